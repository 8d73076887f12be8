"""Chat templates for models that have none, or one that shows no tools."""

from __future__ import annotations

import copy
import pathlib

from routerl_jax.core.tokenizer import Tokenizer

# ChatML with tools as Hermes, Qwen2.5 and Qwen3 write them: schemas within <tools> in the system's message, a call as JSON
# within <tool_call>, a tool's reply within <tool_response> in a user's message. Earlier turns never change.
HERMES = """\
{%- set own = messages[0].role == 'system' -%}
{%- if own or tools -%}
<|im_start|>system
{% if own %}{{ messages[0].content }}{% if tools %}{{ '\\n\\n' }}{% endif %}{% endif -%}
{%- if tools -%}
# Tools

These are the signatures of functions that you may call, within <tools></tools>:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
</tools>

To call a function, write its name and its arguments as a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{%- endif -%}
<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
<|im_start|>assistant
{% if message.content %}{{ message.content }}{% endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{ '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}{{ function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif not (loop.first and own) -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

TEMPLATES = {"hermes": HERMES}


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """A copy of the tokenizer with another chat template, which `Tokenizer.save` writes.

    Args:
      template: a name in TEMPLATES, or the path of a Jinja file.

    Raises:
      ValueError: there is no such name or file, or generation would not end where the template ends a turn.
    """
    text = TEMPLATES.get(template)
    if text is None:
        path = pathlib.Path(template).expanduser()
        if not path.is_file():
            raise ValueError(f"{template!r} is neither one of {', '.join(TEMPLATES)} nor a file of a chat template")
        text = path.read_text("utf-8")
    hf = copy.copy(tokenizer.hf)
    hf.chat_template = text
    changed = Tokenizer(hf)
    try:
        changed.turn_end  # noqa: B018
    except ValueError as error:
        raise ValueError(f"{template!r}: {error}; take a template of the model's own family") from error
    return changed
