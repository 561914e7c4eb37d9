"""Chat template of a checkpoint, for servers that read one, such as vLLM: system = goal, assistant, user = action.

The text equals that of `loopwm.records.template.render_prompt` for messages that `chat_to_prompt` accepts. The template
neither shortens long chats nor checks the order of roles beyond the first two.
"""

from __future__ import annotations

from loopwm.records.template import ACT, END, GOAL, OBS, StateSlots

ORDER = "expected system (goal), assistant (first observation), then user (action) and assistant (observation)"


def chat_template(slots: StateSlots) -> str:
    """Return the Jinja template of a model with these state slots."""
    parts = [
        "{%- macro clean(text) -%}{{ text | trim | replace('<|', '< |') }}{%- endmacro -%}",
        "{%- if messages | length < 3 or messages[0]['role'] != 'system' or messages[1]['role'] != 'assistant' -%}",
        "{{ raise_exception('messages: " + ORDER + "') }}",
        "{%- endif -%}",
        # Jinja has no `break`: a namespace carries the index of the last observation out of the loop.
        "{%- set last = namespace(observation=1) -%}",
        "{%- for message in messages -%}",
        "{%- if message['role'] == 'assistant' -%}{%- set last.observation = loop.index0 -%}{%- endif -%}",
        "{%- endfor -%}",
        "{%- for message in messages -%}",
        "{%- if message['role'] == 'system' -%}" + GOAL + "{{ clean(message['content']) }}",
        "{%- elif message['role'] == 'assistant' -%}" + OBS + "{{ clean(message['content']) }}" + END,
        "{%- if loop.index0 == last.observation -%}" + slots.after_context + "{%- endif -%}",
        "{%- elif message['role'] == 'user' -%}" + ACT + "{{ clean(message['content']) }}",
        "{%- if loop.index0 > last.observation -%}" + slots.after_action,
        "{%- else -%}" + slots.after_real_action + "{%- endif -%}",
        "{%- else -%}{{ raise_exception('messages: unknown role ' + message['role']) }}{%- endif -%}",
        "{%- endfor -%}",
        "{%- if add_generation_prompt -%}" + OBS + "{%- endif -%}",
    ]
    return "\n".join(parts)
