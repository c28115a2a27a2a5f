"""A plan is a value: parse it, compare it, ask what is wrong with it. No torch is loaded.

python examples/02_plans.py
"""

import weft
from weft.config.cluster import ClusterSpec
from weft.config.rules.plan_rules import check
from weft.config.rules.rule import Facts

plan = weft.Plan.parse("dp_shard=4 tp=2 zero=3 precision=bf16")
print(f"{plan} needs {plan.world_size} ranks")
assert weft.Plan.parse(plan.format()) == plan
assert weft.Plan.parse("dp_replicate=* tp=2", world_size=8).dp_replicate == 4

cluster = ClusterSpec.parse("2x8xh100")
print(f"{cluster.num_devices} devices of {cluster.device.memory_bytes / 1e9:.0f} GB each")

model = weft.ModelSpec.named("llama3-8b")
print(f"{model.name} has {model.num_params:,} parameters")

for violation in check(plan.replace(tp=3), Facts(model=model.shape, world_size=8)):
    print("-", violation.message)

try:
    weft.Plan.parse("dp_shrad=4")
except weft.WeftError as error:
    print("-", error)
