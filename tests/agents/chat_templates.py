"""Chat templates in the formats of published models, written for these tests, and a small vocabulary that has their marks."""

from __future__ import annotations

import copy

from tokenizers import AddedToken

from routerl_jax.core.tokenizer import HERMES, Tokenizer
from tests import tiny

# Qwen2.5: a system message of its own, a newline before every call, a tool's reply within a user's message.
QWEN25 = """\
{%- set own = messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + (messages[0].content if own else 'You are Qwen.') }}
{%- if tools %}
{{- '\\n\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant' + ('\\n' + m.content if m.content else '') }}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Qwen3: thoughts stay after the latest question and are stripped before it. `keeps` never: as DeepSeek-R1's distilled models.
_QWEN3 = """\
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') + '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if KEEPS and thought %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
QWEN3 = _QWEN3.replace("KEEPS", "loop.index0 > ns.asked")
STRIPS = _QWEN3.replace("KEEPS", "false")

# Llama 3.1: a date, tools in the first user's message, one call a turn, a tool's text as a JSON string from `ipython`.
LLAMA31 = """\
{{- bos_token }}
{%- set own = messages[0].role == 'system' %}
{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date_string + '\\n\\n' }}
{{- (messages[0].content | trim if own else '') + '<|eot_id|>' }}
{%- set ns = namespace(shown=false) %}
{%- for m in (messages[1:] if own else messages) %}
{%- if m.role == 'user' and tools is not none and not ns.shown %}
{%- set ns.shown = true %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nThese functions may be called as {"name": .., "parameters": ..}.\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- m.content | trim + '<|eot_id|>' }}
{%- elif m.role == 'tool' or m.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
{{- '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

TEMPLATES = {"hermes": HERMES, "qwen25": QWEN25, "qwen3": QWEN3, "llama31": LLAMA31}
_MARKS = (
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)


def tokenizer(template: str | None, given: Tokenizer | None = None) -> Tokenizer:
    """A byte-level vocabulary (or a copy of the one given) with the marks of ChatML and Llama 3, and this chat template."""
    hf = copy.deepcopy((given or tiny.tokenizer()).hf)
    hf.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS])
    hf.bos_token = "<|begin_of_text|>"
    hf.chat_template = template
    return Tokenizer(hf)
