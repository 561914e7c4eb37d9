"""Template of text worlds: renders goals, observations and actions as one string, and parses chat messages.

Torch-free, and the only place that defines the order of the special tokens; data preparation, training, evaluation and
service all render through it.

    context   <|goal|>g [<|hidden|>x] [<|look|>l <|inv|>i] <|obs|>o<|end|> (<|act|>a <|state|>*M <|obs|>o<|end|>)*
    step      <|act|>a <|state|>*M
    decode    <|obs|> observation <|end|>

A context with the next step and its decoded observation is the longer context, token for token. h_0, the state before
the first step, is read at `<|state|>*M` after the context, which no later token attends to. In checkpoints trained
before past steps had slots (`StateSlots.in_trunk`), the slots of h_0 end the context and steps follow them.

User text can never become a special token: `clean` breaks the opening mark `<|` of anything that looks like one.
Special strings are therefore parsed only in a whole prompt of the caller (`/v1/completions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from loopwm.records.errors import InputError

GOAL, LOOK, INV, HIDDEN = "<|goal|>", "<|look|>", "<|inv|>", "<|hidden|>"
OBS, ACT, STATE, END, PAD = "<|obs|>", "<|act|>", "<|state|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, END, GOAL, LOOK, INV, HIDDEN, OBS, ACT, STATE)

CONTEXT_LIMIT = 2048
"""Most tokens of a context, the slots of h_0 included."""

STEP_MARKS = 3
"""Tokens of a step besides its texts and slots: <|act|>, <|obs|>, <|end|>."""

LONGEST_OBSERVATION = 512
"""Most decoded tokens of an observation; the longest room description of ScienceWorld has 370."""


@dataclass(frozen=True)
class StateSlots:
    """Places of `<|state|>`: M = `count` of them after every imagined action and, `in_trunk`, after every real one.

    Otherwise the context ends with the slots of h_0.
    """

    count: int = 1
    in_trunk: bool = True

    @property
    def after_action(self) -> str:
        return STATE * self.count

    @property
    def after_real_action(self) -> str:
        return STATE * self.count if self.in_trunk else ""

    @property
    def after_context(self) -> str:
        return "" if self.in_trunk else STATE * self.count


ContextKind = Literal["observed", "snapshot", "full", "briefed"]
"""Texts shown besides goal and observation, of a window or at the head of a training row: none (observed); look and
inventory now (snapshot); these and the hidden state now (full); the hidden state of the start (briefed).
"""
CONTEXT_KINDS: tuple[ContextKind, ...] = ("observed", "snapshot", "full", "briefed")

NEEDED: dict[ContextKind, tuple[str, ...]] = {
    "observed": (),
    "snapshot": ("look", "inventory"),
    "full": ("look", "inventory", "hidden_state"),
    "briefed": ("hidden_state_start",),
}
"""Nullable fields of a window that each context kind requires."""


class FormatError(InputError):
    """Input that does not fit the template. `field` names the offending part."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContextTooLongError(FormatError):
    """Too many tokens, even after dropping all steps that may be dropped."""


@dataclass(frozen=True)
class Transition:
    """One environment step as the agent saw it."""

    action: str
    observation: str


@dataclass(frozen=True)
class Context:
    """Everything known before the first imagined action.

    `observation` is the first one; `history` the steps after it. `look`, `inventory` and `hidden_state` describe the
    moment of `observation` and are rendered only if given.
    """

    goal: str
    observation: str
    history: tuple[Transition, ...] = ()
    look: str | None = None
    inventory: str | None = None
    hidden_state: str | None = None

    def __post_init__(self) -> None:
        if (self.look is None) != (self.inventory is None):
            raise FormatError("look", "look and inventory are given together or not at all")

    @property
    def texts(self) -> list[str]:
        """Every text that the context shows."""
        parts = [self.goal, self.hidden_state, self.look, self.inventory, self.observation]
        steps = [text for step in self.history for text in (step.action, step.observation)]
        return [part for part in parts if part is not None] + steps


def clean(text: str) -> str:
    """Strip surrounding white space and break every `<|`, so that no text can spell a special token."""
    return text.strip().replace("<|", "< |")


def context_parts(context: Context, slots: StateSlots = StateSlots()) -> tuple[str, list[str]]:
    """Render the head (goal up to the end of the first observation) and one string for each later step."""
    head = GOAL + clean(context.goal)
    if context.hidden_state is not None:
        head += HIDDEN + clean(context.hidden_state)
    if context.look is not None and context.inventory is not None:
        head += LOOK + clean(context.look) + INV + clean(context.inventory)
    head += OBS + clean(context.observation) + END
    return head, [render_transition(step, slots) for step in context.history]


def render_transition(step: Transition, slots: StateSlots = StateSlots()) -> str:
    return ACT + clean(step.action) + slots.after_real_action + OBS + clean(step.observation) + END


def render_context(context: Context, slots: StateSlots = StateSlots()) -> str:
    """Render the real steps; the slots of h_0 are not included."""
    head, steps = context_parts(context, slots)
    return head + "".join(steps)


def render_step(action: str, slots: StateSlots = StateSlots()) -> str:
    if not action.strip():
        raise FormatError("action", "an action must not be empty")
    return ACT + clean(action) + slots.after_action


def render_prompt(context: Context, actions: Sequence[str], slots: StateSlots = StateSlots()) -> str:
    """Render context, deferred actions and the decode mark: the prompt that a causal language model continues."""
    if not actions:
        raise FormatError("actions", "at least one action is needed")
    steps = "".join(render_step(action, slots) for action in actions)
    return render_context(context, slots) + slots.after_context + steps + OBS


def fit_context(
    context: Context,
    count_tokens: Callable[[str], int],
    limit: int = CONTEXT_LIMIT,
    slots: StateSlots = StateSlots(),
    filled: int = CONTEXT_LIMIT,
) -> tuple[Context, int]:
    """Drop the oldest steps after the first observation until the context fits.

    It fits with at most `limit` tokens, and no step but the newest beyond `filled`. Goal, first observation and the
    texts of its moment always stay, as does the newest step. Returns the shortened context and the number of dropped
    steps. Raises ContextTooLongError if what stays exceeds the limit by itself.
    """
    head, steps = context_parts(context, slots)
    total = count_tokens(head)
    if total > limit:
        raise ContextTooLongError("context", f"up to the first observation it has {total} tokens, the limit is {limit}")
    remaining = 0
    for step in reversed(steps):
        total += count_tokens(step)
        if total > (min(limit, filled) if remaining else limit):
            break
        remaining += 1
    if steps and not remaining:
        raise ContextTooLongError("context", f"with its newest step alone it has {total} tokens, the limit is {limit}")
    dropped = len(steps) - remaining
    return replace(context, history=context.history[dropped:]), dropped


def window_context(window: Mapping[str, Any], context_kind: ContextKind) -> Context:
    """Build the context of an evaluation window, of one of `CONTEXT_KINDS`.

    observed: goal and history, as an agent sees. snapshot: goal, look, inventory and the last observation now. full:
    snapshot and the hidden state now. briefed: observed and the hidden state at the start of the episode, the setting
    of Word2World (arXiv:2512.18832). Raises FormatError naming a required field that the window lacks.
    """
    if context_kind not in CONTEXT_KINDS:
        raise FormatError("context", f"unknown context {context_kind!r}, expected one of {', '.join(CONTEXT_KINDS)}")
    for field in NEEDED[context_kind]:
        if window.get(field) is None:
            raise FormatError(field, f"is null, but context {context_kind!r} needs it")
    history = window["history"]
    if context_kind in ("observed", "briefed"):
        steps = tuple(Transition(step["action"], step["observation"]) for step in history[1:])
        start = window["hidden_state_start"] if context_kind == "briefed" else None
        return Context(window["goal"], history[0]["observation"], steps, hidden_state=start)
    hidden = window["hidden_state"] if context_kind == "full" else None
    return Context(window["goal"], history[-1]["observation"], (), window["look"], window["inventory"], hidden)


def chat_to_prompt(messages: Sequence[tuple[str, str]]) -> tuple[Context, list[str]]:
    """Parse (role, text) messages: system = goal, assistant = observations, user = actions.

    The first assistant message opens the conversation; user messages after the last assistant message are the deferred
    actions. Raises FormatError naming the message at fault.
    """
    order = "expected: system (goal), assistant (first observation), then user (action) and assistant (observation) "
    order += "in turn, and one or more user messages (the actions to imagine) at the end"
    roles = [role for role, _ in messages[:2]]
    if roles != ["system", "assistant"]:
        raise FormatError("messages", f"must begin with system and assistant, got {roles}; {order}")
    last = max(i for i, (role, _) in enumerate(messages) if role == "assistant")
    actions: list[str] = []
    steps: list[Transition] = []
    for i, (role, text) in enumerate(messages[2:], start=2):
        if (i <= last and role != ("user" if i % 2 == 0 else "assistant")) or (i > last and role != "user"):
            raise FormatError(f"messages[{i}].role", f"unexpected {role!r}; {order}")
        if role == "user" and not text.strip():
            raise FormatError(f"messages[{i}].content", "an action must not be empty")
        if i > last:
            actions.append(text)
        elif role == "assistant":
            steps.append(Transition(messages[i - 1][1], text))
    if not actions:
        raise FormatError("messages", f"no action to imagine; {order}")
    return Context(messages[0][1], messages[1][1], tuple(steps)), actions
