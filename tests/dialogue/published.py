"""Chat templates of published shapes whose calls have marks of their own; the wording is ours, cut down to what decides
the layout: turns, calls, results, what is refused, and what the template leaves out."""

from __future__ import annotations

MISTRAL = """{{ bos_token }}{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{% if m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'user' %}{% if tools and m == asked[-1] %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- m.content }}{% for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}"""
"""Ministral 3's, Devstral 2's."""

MISTRAL_IDS = MISTRAL.replace("+ '[ARGS]' +", "+ '[CALL_ID]' + c.id + '[ARGS]' +").replace(
    "'[TOOL_RESULTS]' +", "'[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' +"
)
"""Mistral Small 3.2's, Magistral's."""

MISTRAL_LIST = """{{ bos_token }}{% set ns = namespace(n=0) %}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('roles must alternate') }}{% endif %}
{%- set ns.n = ns.n + 1 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{% if tools and m == asked[-1] %}
{{- '[AVAILABLE_TOOLS]BLANK' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]BLANK' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS]BLANK[' }}{% for c in m.tool_calls %}
{%- set out = c.function | tojson %}{{- out[:-1] }}
{%- if c.id is not defined or c.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{% endif %}
{{- ', "id": "' + c.id + '"}' }}{{- ']' + eos_token if loop.last else ', ' }}{% endfor %}
{%- elif m.role == 'assistant' %}{{- 'BLANK' + m.content | trim + eos_token }}
{%- else %}{% if m.tool_call_id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{% endif %}
{{- '[TOOL_RESULTS]BLANK{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{% endfor %}"""
"""Mistral 7B Instruct v0.3's (with blanks) and Nemo's (without): text before calls has no place."""

DEEPSEEK = """{% set ns = namespace(said='', shown=true) %}{{ bos_token }}
{%- if tools %}{{- '# Tools\\n' + tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{{- '<｜User｜>' + m.content + '<｜Assistant｜>' }}
{%- elif m.role == 'assistant' %}{% if ns.said == 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
{{- m.content or '' }}{% if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}
{{- '' if loop.first else '\\n' }}{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name }}
{{- '\\n```json\\n' + c.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}
{{- '<｜tool▁calls▁end｜>' }}{% endif %}{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{- '<｜tool▁outputs▁begin｜>' if ns.said != 'tool' else '\\n' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}{% set ns.said = m.role %}{% endfor %}
{%- if ns.said == 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}"""
"""DeepSeek V3's, as vLLM's examples mend it."""

DEEPSEEK_31 = """{% set ns = namespace(asked=false) %}{{ bos_token }}
{%- if tools %}{{- '## Tools\\n' + tools | tojson }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = true %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}{% if ns.asked %}{{- '<｜Assistant｜></think>' }}{% endif %}{% set ns.asked = false %}
{{- m.content or '' }}{% if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}{{- '<｜end▁of▁sentence｜>' }}
{%- else %}{% set ns.asked = false %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt and ns.asked %}{{- '<｜Assistant｜></think>' }}{% endif %}"""
"""DeepSeek V3.1's, as in vLLM's examples: arguments must be JSON text."""

GLM = """[gMASK]<sop>{% if tools %}{{- '<|system|>\\n# Tools\\n' + tools | tojson }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}{{- '<|assistant|>' }}{% set content = m.content %}{% set thought = '' %}
{%- if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1] %}{% endif %}
{{- '\\n<think>' + (thought if loop.index0 > ns.last else '') + '</think>' }}
{{- '\\n' + content.strip() if content.strip() else '' }}
{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>' + c.function.name + '\\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- else %}{% if messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""
"""GLM 4.5's: nothing ends a turn but what begins the next."""

HARMONY = """<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}{{- '<|start|>developer<|message|># Tools\\n' + tools | tojson + '<|end|>' }}{% endif %}
{%- set ns = namespace(name=none) %}{% for m in messages %}{% if m.role == 'user' %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- elif m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set ns.name = call.name %}
{%- if m.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson + '<|call|>' }}
{%- else %}{% if '<|channel|>final<|message|>' in m.content %}{{- raise_exception('channels in content') }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
"""GPT-OSS's: one call a turn, and what ends an answer ends no turn before another."""

PLAIN = {
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('roles must alternate') }}{% endif %}"
        "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}"
        "{{- '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}",
        "<end_of_turn>",
    ),
    "phi-4": (
        "{% for m in messages %}{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        "<|im_end|>",
    ),
    "olmo-2": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{- '<|assistant|>\\n' + m.content + eos_token }}{{- '' if loop.last else '\\n' }}"
        "{% else %}{{- '<|' + m.role + '|>\\n' + m.content + '\\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "llama-3": (
        "{% for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim }}"
        "{{- '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
        "<|eot_id|>",
    ),
}
"""Templates that know no tools, and what ends a turn under them."""
