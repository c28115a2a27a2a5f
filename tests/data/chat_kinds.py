# ruff: noqa: E501
"""Chat templates of published kinds, with `B` and `E` around the assistant's text.

`B` and `E` are variables: empty for Weft, and markers for a test that needs the trained text.
"""

from __future__ import annotations

_CALLS = (
    "{% for call in m.tool_calls or [] %}{% set call = call.function %}\n<tool_call>\n"
    '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
#: Qwen3's test for turns after the last question.
_LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' and not "
    "m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_THOUGHT = (
    "{% set content = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
_ASKS = "{% if add_generation_prompt %}"

KINDS = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ B }}{% endif %}"
        "{{ m.content }}<|im_end|>{% if m.role == 'assistant' %}{{ E }}{% endif %}\n{% endfor %}"
        + _ASKS
        + "<|im_start|>assistant\n{% endif %}"
    ),
    "chatml without a generation prompt": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ B }}{% endif %}"
        "{{ m.content }}<|im_end|>{% if m.role == 'assistant' %}{{ E }}{% endif %}\n{% endfor %}"
    ),
    "llama 2": (
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}"
        "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
        "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m.content %}"
        "{% else %}{% set content = m.content %}{% endif %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
        "{% else %}{{ B }} {{ content | trim }} {{ eos_token }}{{ E }}{% endif %}{% endfor %}"
    ),
    "llama 3.1": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}"
        "Cutting Knowledge Date: December 2023\nToday Date: {{ date_string | default('26 Jul 2024') }}\n\n{{ system }}<|eot_id|>"
        "{% for m in rest %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
        "{% set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{{ B }}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>{{ E }}'
        "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
        "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.role == 'assistant' %}{{ B }}{% endif %}"
        "{{ m.content | trim }}<|eot_id|>{% if m.role == 'assistant' %}{{ E }}{% endif %}{% endif %}{% endfor %}"
        + _ASKS
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral 0.1": (
        "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ B }} {{ m.content }}{{ eos_token }}{{ E }}"
        "{% endif %}{% endfor %}"
    ),
    "mistral 3": (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{{ bos_token }}"
        "{% for m in rest %}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}[INST] {% if loop.last and system is defined %}{{ system }}\n\n{% endif %}"
        "{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}{{ B }}[TOOL_CALLS] [{% for call in m.tool_calls %}{% set f = call.function %}"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}'
        "{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be 9 letters!') }}{% endif %}"
        ', "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}{{ E }}'
        '{% elif m.role == \'tool\' %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
        "[/TOOL_RESULTS]{% else %}{{ B }} {{ m.content }}{{ eos_token }}{{ E }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{% if m.role == 'assistant' %}{{ B }}{% endif %}{{ m.content | trim }}<end_of_turn>"
        "{% if m.role == 'assistant' %}{{ E }}{% endif %}{{ '\n' }}{% endfor %}"
        + _ASKS
        + "{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "qwen 2.5": (
        "<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}"
        "{% if tools %}\n\n# Tools\n" + _TOOLS + "{% endif %}<|im_end|>\n"
        "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ B }}{{ m.content or '' }}"
        + _CALLS
        + "<|im_end|>{{ E }}\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
        "{% endif %}{% endfor %}" + _ASKS + "<|im_start|>assistant\n{% endif %}"
    ),
    "qwen 3": (
        _LAST + "{% if tools %}<|im_start|>system\n" + _TOOLS + "<|im_end|>\n{% endif %}"
        "{% for m in messages %}" + _THOUGHT + "{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ B }}"
        "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\\n') }}\n</think>\n\n"
        "{{ content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}" + _CALLS + "<|im_end|>{{ E }}\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ content }}\n</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + _ASKS
        + "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "qwen 3.5": (  # the prompt opens the thoughts
        _LAST + "{% for m in messages %}" + _THOUGHT + "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        "{% if loop.index0 > ns.last %}<think>\n{{ B }}{{ thought.strip('\\n') }}\n</think>\n\n{{ content }}"
        "{% else %}{{ B }}{{ content }}{% endif %}" + _CALLS + "<|im_end|>{{ E }}\n"
        "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ content }}\n</tool_response><|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + _ASKS
        + "<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    "deepseek r1": (
        "{% set ns = namespace(system='', is_tool=false, is_first=true) %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}"
        "{{ bos_token }}{{ ns.system }}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.is_tool = false %}{{ '<｜User｜>' + m.content }}"
        "{% elif m.role == 'assistant' and m.tool_calls %}<｜Assistant｜>{{ B }}<｜tool▁calls▁begin｜>"
        "{% for call in m.tool_calls %}{% if not loop.first %}{{ '\n' }}{% endif %}"
        "{{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' "
        "+ call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{{ E }}"
        "{% elif m.role == 'assistant' %}{% set content = m.content %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{% if ns.is_tool %}<｜tool▁outputs▁end｜>{% set ns.is_tool = false %}{% else %}<｜Assistant｜>{% endif %}"
        "{{ B }}{{ content }}<｜end▁of▁sentence｜>{{ E }}"
        "{% elif m.role == 'tool' %}{% if not ns.is_tool %}<｜tool▁outputs▁begin｜>{% else %}{{ '\n' }}{% endif %}"
        "{% set ns.is_tool = true %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
        "{% endif %}{% endfor %}{% if ns.is_tool %}<｜tool▁outputs▁end｜>{% endif %}"
        "{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
    ),
    "channels": (
        "{% set ns = namespace(last=-1, name='') %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "<|start|>system<|message|>Reasoning: medium<|end|>"
        "{% if tools %}<|start|>developer<|message|>" + _TOOLS + "<|end|>{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if '<|channel|>' in (m.content or '') %}{{ raise_exception('no channel tags in contents') }}{% endif %}"
        "<|start|>assistant{{ B }}{% if m.thinking and loop.index0 > ns.last %}"
        "<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
        "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set ns.name = call.name %}"
        "{{ ' to=functions.' + call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
        "{% else %}<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{{ E }}"
        "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>"
        "{{ m.content | tojson }}<|end|>"
        "{% elif m.role == 'system' %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        + _ASKS
        + "<|start|>assistant{% endif %}"
    ),
    "phi 3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}{% if m.role == 'assistant' %}{{ B }}{% endif %}"
        "{{ m.content }}<|end|>{% if m.role == 'assistant' %}{{ E }}{% endif %}{{ '\n' }}{% endfor %}"
        + _ASKS
        + "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "phi 4": (
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{% if m.role == 'assistant' %}{{ B }}{% endif %}"
        "{{ m.content }}<|im_end|>{% if m.role == 'assistant' %}{{ E }}{% endif %}{% endfor %}"
        + _ASKS
        + "<|im_start|>assistant<|im_sep|>{% endif %}"
    ),
    "zephyr": (
        # Its prompt lacks the newline, so the model generates it.
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{{ B }}{% endif %}"
        "{{ '\n' + m.content + eos_token }}{% if m.role == 'assistant' %}{{ E }}{% endif %}{{ '\n' }}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
    ),
    "command r": (
        "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ {'user': '<|USER_TOKEN|>', 'system': "
        "'<|SYSTEM_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[m.role] }}{% if m.role == 'assistant' %}{{ B }}{% endif %}"
        "{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}{{ E }}{% endif %}{% endfor %}"
        + _ASKS
        + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
    ),
    "glm": (
        "[gMASK]<sop>{% if tools %}<|system|>\n"
        + _TOOLS
        + "{% endif %}"
        + _LAST
        + "{% for m in messages %}"
        + _THOUGHT
        + "{% if m.role == 'user' %}<|user|>\n{{ content }}{% elif m.role == 'assistant' %}<|assistant|>{{ B }}"
        "{% if loop.index0 > ns.last and thought %}{{ '\n<think>' + thought.strip() + '</think>' }}"
        "{% else %}{{ '\n<think></think>' }}{% endif %}{% if content.strip() %}{{ '\n' + content.strip() }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}"
        "{% for key, value in call.function.arguments.items() %}\n<arg_key>{{ key }}</arg_key>\n<arg_value>"
        "{{ value if value is string else value | tojson }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}{{ E }}"
        "{% elif m.role == 'tool' %}<|observation|>{{ '\n<tool_response>\n' + content + '\n</tool_response>' }}"
        "{% else %}<|system|>\n{{ content }}{% endif %}{% endfor %}" + _ASKS + "<|assistant|>{% endif %}"
    ),
    "plain names": (
        "{% for m in messages %}{% if m.role == 'assistant' %}### Response:\n{{ B }}{{ m.content }}{{ eos_token }}{{ E }}\n\n"
        "{% else %}### {{ m.role | capitalize }}:\n{{ m.content }}\n\n{% endif %}{% endfor %}"
        + _ASKS
        + "### Response:\n{% endif %}"
    ),
}
SPECIALS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<start_of_turn>", "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<|start|>", "<|end|>", "<|message|>",
    "<|channel|>", "<|return|>", "<|call|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>",
    "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
    "[gMASK]", "<sop>",
]  # fmt: skip
#: Kinds whose special tokens do not include some of these, as published.
LESS_SPECIAL = {
    "llama 2": ("[INST]", "[/INST]"), "mistral 0.1": ("[INST]", "[/INST]"), "zephyr": ("<|user|>", "<|assistant|>", "<|system|>")
}  # fmt: skip
