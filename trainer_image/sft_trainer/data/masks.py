"""Which tokens of a conversation are trained: exact, or refused.

The whole conversation is rendered once and tokenised once; what is trained is found as spans of *characters*, and
mapped to tokens by the tokenizer's offsets. (Tokenising prefixes and comparing lengths is wrong where a token spans
the boundary, and rendering prefixes is wrong where templates rewrite history.) Spans come from

1. the template's own ``{% generation %}`` blocks, or
2. the generation prompt, where the text begins with it, up to the end-of-turn token: the first one behind which
   nothing but the template's constant tail follows when the turn is the last of the conversation.

A turn is refused when neither holds, and when the template rewrites it once later turns follow, because then the
text that would be trained is not the text that the model writes. The end-of-turn token is always trained, and with it
what closes every turn behind it, if anything does: without the token at which a model stops it never learns to. A
template that writes none (GLM's) has models stop at the token that begins the next turn: it is put behind the last one.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .chat import ChatTemplate, Message, Span, TemplateRefusal
from .turns import Conversation

TrainOn = Literal["lastAssistantMessage", "allAssistantMessages", "allTokens"]

_ALTERATION = "altered"


@dataclass(frozen=True)
class MarkedText:
    """A rendered conversation and the spans of it that are trained, in order and disjoint."""

    text: str
    spans: list[Span]
    incomplete: int = 0
    """Trained messages of which the template leaves out text, such as reasoning that it does not know, or the tools."""
    context_answers: int = 0
    """Answers in it that are not trained because ``data.trainOn`` says so, and not their own flag."""
    empty: int = 0
    """Trained messages that say nothing."""
    answers: int = 1
    """Trained messages."""


def selected_turns(conversation: Conversation, train_on: TrainOn) -> list[int]:
    """Indices of the answers to train: by ``train_on``, unless the message's own flag says otherwise."""
    answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if train_on == "allTokens":
        return answers
    answers = [i for i in answers if i >= conversation.prompt]
    chosen = answers if train_on == "allAssistantMessages" else answers[-1:]
    return [i for i in answers if (i in chosen if conversation.flags[i] is None else conversation.flags[i])]


def mark(template: ChatTemplate, conversation: Conversation, train_on: TrainOn) -> MarkedText | None:
    """The text of a conversation with its trained spans; None when no turn of it is to be trained.

    Turns after the last trained one are left out: they cannot influence anything that is trained. With ``allTokens``
    all of it is one span.
    Raises TemplateRefusal when the spans cannot be known exactly.
    """
    selected, messages = selected_turns(conversation, train_on), conversation.messages
    if train_on == "allTokens":
        _check_flags(conversation)
        rendered = template.render(messages, conversation.tools)
        text = rendered + _begun_next(template, messages[-1])
        spans = [(0, len(text))]
    elif not selected:
        return None
    else:
        messages = messages[: selected[-1] + 1]
        rendered, text, spans = _spans_of_turns(template, messages, conversation.tools, selected)
    trained = "".join(text[start:end] for start, end in spans)
    for i, message in enumerate(messages):
        _check_calls(message, i, trained if i in selected else text)
    # What is trained has no list of the tools, unless it is all of the text.
    found = [] if train_on == "allTokens" else selected
    _check_other_calls(template, rendered, messages, conversation.tools, found)
    _check_context(template, rendered, messages, conversation.tools)
    lacks_tools = bool(conversation.tools) and not _writes_tools(template, rendered, messages)
    return MarkedText(
        text,
        spans,
        incomplete=sum(lacks_tools or not _is_written(messages[i], trained) for i in selected),
        context_answers=sum(
            message["role"] == "assistant" and i not in selected and conversation.flags[i] is None
            for i, message in enumerate(messages[conversation.prompt :], conversation.prompt)
        ),
        empty=sum(_says_nothing(messages[i]) for i in selected),
        answers=len(selected),
    )


def _spans_of_turns(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None, selected: list[int]
) -> tuple[str, str, list[Span]]:
    """The render of ``messages``, the text that is trained of it, and the spans of that."""
    if template.has_markers:
        text, spans = _marked_spans(template, messages, tools, selected)
        return text, text, spans
    rendered = template.render(messages, tools)
    text = _as_asked(template, rendered, messages, tools) + _begun_next(template, messages[-1])
    return rendered, text, [_turn_span(template, text, messages, tools, turn) for turn in selected]


def _begun_next(template: ChatTemplate, message: Message) -> str:
    """The token behind the last ``message`` that the template would write in front of another one, where answers end
    with nothing else."""
    return template.assistant_turn.begun_next(message) if message["role"] == "assistant" else ""


def _as_asked(template: ChatTemplate, text: str, messages: list[Message], tools: list[Any] | None) -> str:
    """``text``, the render of ``messages``, as the model is asked for the last of them, an answer: where the generation
    prompt says that there is no reasoning, and a conversation without any does not, with what it says."""
    said = template.no_reasoning
    if not said or "reasoning_content" in messages[-1]:
        return text
    with suppress(TemplateRefusal):  # which is told where it is asked for next
        prompt = template.render(messages[:-1], tools, generation_prompt=True)
        before = prompt.removesuffix(said)
        if before != prompt and text.startswith(before) and not text.startswith(prompt):
            return prompt + text.removeprefix(before)
    return text


def _check_flags(conversation: Conversation) -> None:
    """Raises TemplateRefusal where a message asks not to be trained, as all of the text is."""
    if (turn := next((i for i, flag in enumerate(conversation.flags) if flag is False), None)) is not None:
        raise TemplateRefusal(
            f"message {turn + 1} says that it is not trained (train or weight), and data.trainOn: allTokens trains all "
            "of a conversation; remove that, or set data.trainOn: allAssistantMessages"
        )


def _says_nothing(message: Message) -> bool:
    return not message.get("tool_calls") and not any(
        message.get(key, "").strip() for key in ("content", "reasoning_content")
    )


def _check_calls(message: Message, turn: int, text: str) -> None:
    """Raises TemplateRefusal when tool calls of ``message`` are missing in ``text``.

    Without those that are trained the model would learn to answer nothing, and without those before its answer to say
    by itself what a tool has told it.
    """
    for name in _called(message):
        if name not in text:
            raise _unwritten(name, turn)


def _called(message: Message) -> list[str]:
    """Names of the tools that ``message`` calls."""
    return [call.get("function", call)["name"] for call in message.get("tool_calls", ())]


def _unwritten(name: str, turn: int) -> TemplateRefusal:
    return TemplateRefusal(
        f"the template does not write the tool call {name!r} of message {turn + 1}; set a "
        "model.chatTemplate that knows tools, or leave such rows out"
    )


def _check_other_calls(
    template: ChatTemplate, text: str, messages: list[Message], tools: list[Any] | None, found: list[int]
) -> None:
    """Raises TemplateRefusal when ``text``, the render of ``messages``, would be the same with other tool calls: their
    names may stand in it as those of ``tools``, or because somebody spoke of them. Those of the messages ``found`` are
    known to be written, at least the first of each, and so is what a message says in its content."""
    unsaid = [
        i
        for i, message in enumerate(messages)
        if any(name not in message.get("content", "") for name in _called(message))
    ]
    calling = [i for i in unsaid if i not in found]
    if calling and not _changes(template, text, _with_other_calls(messages, calling), tools):
        raise _unwritten(_called(messages[calling[0]])[0], calling[0])
    several = [i for i in unsaid if len(_called(messages[i])) > 1]
    if several and not _changes(template, text, _with_other_calls(messages, several, first=1), tools):
        raise TemplateRefusal(
            f"the template writes only the first of the tool calls of message {several[0] + 1}; set a "
            "model.chatTemplate that writes several, or leave such rows out"
        )


def _with_other_calls(messages: list[Message], turns: list[int], *, first: int = 0) -> list[Message]:
    """``messages``, of which those of ``turns`` have other calls from number ``first`` on."""
    return [
        {**message, "tool_calls": [*message["tool_calls"][:first], *map(_other_call, message["tool_calls"][first:])]}
        if i in turns
        else message
        for i, message in enumerate(messages)
    ]


def _other_call(call: Message) -> Message:
    """``call`` with another name and other arguments: Kimi K2's template writes its id and not its name, and not every
    call has arguments."""
    other: Message = _altered(call)
    function = other.get("function", other)
    function["arguments"] = {**function["arguments"], _ALTERATION: _ALTERATION}
    return other


def _check_context(template: ChatTemplate, text: str, messages: list[Message], tools: list[Any] | None) -> None:
    """Raises TemplateRefusal when ``text`` has nothing of what a tool, the user or the system says in ``messages``.

    Some templates pass over roles that they do not know, and what answers go by would be taken for the model's own
    knowledge.
    """
    squeezed, position = _squeezed(text), 0
    for i, message in enumerate(messages):
        content = message.get("content", "")
        # As it stands, or as JSON, as many templates write what tools say; all else is rendered once more to know.
        forms = [_squeezed(form) for form in (content, json.dumps(content, ensure_ascii=False)[1:-1])]
        ends = [at + len(form) for form in forms if (at := squeezed.find(form, position)) >= 0]
        if ends:
            # Some write what the system says before the last turn of the user, whatever stands between.
            position = position if message["role"] == "system" else ends[0]
            continue
        others = [*messages[:i], _altered(message), *messages[i + 1 :]]
        if message["role"] != "assistant" and not _changes(template, text, others, tools):
            raise TemplateRefusal(
                f"the template does not write message {i + 1} ({message['role']}), so the model would not see what its "
                "answer goes by; set a model.chatTemplate that does, or leave that turn out"
            )


def _changes(template: ChatTemplate, text: str, messages: list[Message], tools: list[Any] | None) -> bool:
    """Whether ``messages`` have another render than ``text``, that of other ones: many templates write what is said in
    another form."""
    try:
        return template.render(messages, tools) != text
    except TemplateRefusal:
        return True


def _writes_tools(template: ChatTemplate, text: str, messages: list[Message]) -> bool:
    """Whether ``text``, the render of ``messages`` with tools, would be another one without. Few templates write them
    beside some turns only."""
    try:
        return template.writes_tools or template.render(messages) != text
    except TemplateRefusal:
        return True


def _is_written(message: Message, trained: str) -> bool:
    """Whether ``trained`` holds the message's own text, whatever white space the template gave it."""
    own = [message.get(key, "") for key in ("content", "reasoning_content")]
    if all(text in trained for text in own):
        return True
    squeezed = _squeezed(trained)
    return all(_squeezed(text) in squeezed for text in own)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _turn_span(template: ChatTemplate, text: str, messages: list[Message], tools: list[Any] | None, turn: int) -> Span:
    """The span of message ``turn`` in ``text``, the render of ``messages``."""
    is_last = turn == len(messages) - 1
    # What the model wrote when this turn was the last one.
    begun_next = _begun_next(template, messages[turn])
    text_then = text if is_last else template.render(messages[: turn + 1], tools) + begun_next
    try:
        prompt = next(template.generation_prompts(messages[:turn], tools, text_then), None)
    except TemplateRefusal as error:  # many look at the first turn, where an answer has nothing before it
        raise TemplateRefusal(
            f"the template has no generation prompt behind what stands before message {turn + 1} (assistant), so the "
            f'start of that answer is not known exactly; flag it with "train": false, put a question before it, or '
            f"set a model.chatTemplate with {{% generation %}} markers ({error})"
        ) from error
    # Where prompts say that there is no reasoning, a conversation says it of its last answer alone.
    changes = bool(template.no_reasoning) if prompt is None else not text.startswith(prompt)
    if changes and not is_last:
        raise TemplateRefusal(
            f"the template changes what stands before message {turn + 1} once later turns follow, so that turn "
            "cannot be trained with the context it was written in; set data.trainOn: lastAssistantMessage, or a "
            "model.chatTemplate with {% generation %} markers"
        )
    if prompt is None:
        why = _why_no_start(template, text_then, messages[:turn], tools)
        if template.no_reasoning and "reasoning_content" in messages[turn]:
            why += ', or have the row ask for reasoning ("chat_template_kwargs": {"enable_thinking": true})'
        raise TemplateRefusal(why)
    written = text_then[len(prompt) : _end_of_turn(template, text_then, len(prompt))]
    if is_last:
        return len(prompt), len(prompt) + len(written)
    # Templates that write an empty reasoning block in the newest turn leave it out of older ones.
    for kept in (written, written.removeprefix(template.assistant_turn.lead)):
        if text.startswith(kept, len(prompt)):
            return len(prompt), len(prompt) + len(kept)
    if begun_next and text.startswith(written.removesuffix(begun_next), len(prompt)):
        raise TemplateRefusal(
            f"message {turn + 1} (assistant) ends with {begun_next!r}, which this template writes in front of what is "
            f"to follow, and what follows is of another role ({messages[turn + 1]['role']}); flag the message with "
            '"train": false, or set data.trainOn: lastAssistantMessage'
        )
    raise TemplateRefusal(
        f"the template rewrites message {turn + 1} (assistant) once later turns follow (it removes reasoning, for "
        "instance), so its tokens are not what the model would write; set data.trainOn: lastAssistantMessage, "
        'flag the message with "train": false, or set a model.chatTemplate with {% generation %} markers'
    )


def _end_of_turn(template: ChatTemplate, text: str, start: int) -> int:
    """Where the last turn of ``text``, begun at ``start``, ends: behind its end-of-turn token."""
    turn = template.assistant_turn
    for match in turn.end_pattern.finditer(text, start):
        rest = text[match.end() :]
        if not rest.strip() or rest == turn.tail:
            return _behind_closing(template, text, match.end())
    raise TemplateRefusal(
        f"the text of the assistant's turn does not end with one of {', '.join(turn.ends)}: {text[start:]!r:.200}; "
        "set a model.chatTemplate with {% generation %} markers"
    )


def _behind_closing(template: ChatTemplate, text: str, end: int) -> int:
    """``end``, of an end-of-turn token in ``text``; that of what closes every turn where it stands there."""
    closing = template.assistant_turn.closing
    return end + len(closing) if text.startswith(closing, end) else end


def _why_no_start(template: ChatTemplate, text: str, messages: list[Message], tools: list[Any] | None) -> str:
    prompt = template.render(messages, tools, generation_prompt=True)
    same = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(text))
    return (
        "the chat template's generation prompt is not how it begins the assistant's turn in a conversation, so the "
        f"start of the answer is not known exactly: the prompt continues with {prompt[same : same + 40]!r}, the "
        f"conversation with {text[same : same + 40]!r}; set a model.chatTemplate whose assistant turns begin with "
        "the generation prompt, or one with {% generation %} markers"
    )


def _marked_spans(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None, selected: list[int]
) -> tuple[str, list[Span]]:
    text, spans = template.render_marked(messages, tools)
    if selected != [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
        spans = _spans_of(template, messages, tools, selected)
    spans = [_with_end_of_turn(template, text, span) for span in spans]
    spans = [(start, end) for start, end in spans if start < end]
    if not spans:
        raise TemplateRefusal("the template marks no text of the trained turns with {% generation %}")
    return text, spans


def _with_end_of_turn(template: ChatTemplate, text: str, span: Span) -> Span:
    """``span`` and the end-of-turn token behind it, for templates that leave it outside their markers."""
    start, end = span
    token = template.assistant_turn.end_pattern.pattern
    if re.search(rf"(?:{token})\s*$", text[start:end]):
        return start, _behind_closing(template, text, end)
    match = re.compile(rf"\s*(?:{token})").match(text, end)
    return (start, _behind_closing(template, text, match.end())) if match else span


def _spans_of(
    template: ChatTemplate, messages: list[Message], tools: list[Any] | None, selected: list[int]
) -> list[Span]:
    """The marked spans that hold text of the ``selected`` messages: those that change when these change."""
    others = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i not in selected]
    text, spans = template.render_marked(messages, tools)

    def changed(altered: list[int]) -> list[bool]:
        other = [_altered(message) if i in altered else message for i, message in enumerate(messages)]
        other_text, other_spans = template.render_marked(other, tools)
        if len(other_spans) != len(spans):
            raise TemplateRefusal(
                "the template writes a varying number of {% generation %} blocks for the same turns, so those of "
                "the trained turns are not known; set data.trainOn: allAssistantMessages and use no flags"
            )
        return [text[slice(*span)] != other_text[slice(*other)] for span, other in zip(spans, other_spans, strict=True)]

    mine, theirs = changed(selected), changed(others)
    if any(a and b for a, b in zip(mine, theirs, strict=True)):
        raise TemplateRefusal("one {% generation %} block holds text of trained and of untrained turns")
    return [span for span, is_mine in zip(spans, mine, strict=True) if is_mine]


def _altered(value: Any) -> Any:
    """A message with every text of its own made longer."""
    if isinstance(value, str):
        return value + _ALTERATION
    if isinstance(value, dict):
        fixed = ("role", "type", "id", "tool_call_id")
        return {key: item if key in fixed else _altered(item) for key, item in value.items()}
    return [_altered(item) for item in value] if isinstance(value, list) else value


def strings_of(value: Any) -> Iterator[str]:
    """All strings inside ``value``, keys of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_of(key)
            yield from strings_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_of(item)


def foreign_control_token(conversation: Conversation, control_tokens: re.Pattern[str]) -> str | None:
    """A sentence on the first control token that the data itself spells out, or None.

    The tokenizer cannot tell such text from what the template writes: a user who types an end-of-turn token would
    end the turn.
    """
    for i, message in enumerate(conversation.messages):
        for text in strings_of(message):
            if match := control_tokens.search(text):
                return f"message {i + 1} ({message['role']}) contains the control token {match.group()!r} as text"
    for text in strings_of(conversation.tools):
        if match := control_tokens.search(text):
            return f"the tools contain the control token {match.group()!r} as text"
    for text in strings_of(conversation.variables):
        if match := control_tokens.search(text):
            return f"column 'chat_template_kwargs' contains the control token {match.group()!r} as text"
    return None


def token_mask(text: str, offsets: Sequence[Span], spans: Sequence[Span]) -> tuple[NDArray[np.uint8], int]:
    """Trained tokens (uint8 of shape (tokens,)) and how many of them straddle the border of a span.

    ``offsets`` are the tokens' characters, ascending. A token that is partly inside a span is trained: leaving it
    out would train the answer without its beginning. White space that an end-of-turn token takes in behind a span
    is no straddling. The first token is never trained, for nothing predicts it.
    """
    mask = np.zeros(len(offsets), np.uint8)
    straddling = 0
    for start, end in spans:
        first = bisect_right(offsets, start, key=itemgetter(1))
        last = bisect_left(offsets, end, key=itemgetter(0))
        if first >= last:
            continue
        mask[first:last] = 1
        straddling += offsets[first][0] < start
        straddling += bool(text[end : offsets[last - 1][1]].strip())
    mask[:1] = 0
    return mask, straddling
