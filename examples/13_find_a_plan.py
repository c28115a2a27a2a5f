"""Ask the planner before you rent a machine: the best plan, why another loses, what fits. No torch is loaded.

python examples/13_find_a_plan.py
"""

import weft

answer = weft.search("llama3-8b", "8xh100", seq_len=4096, global_batch=64)
best = answer[0]
print(best.explain())

print("\nThe next ones:")
for other in answer[1:4]:
    print(f"  {other.plan}: {other.step_s:.2f} s a step")
