"""Chat templates: rendered as transformers renders them, and probed for how they frame an assistant message.

The sandbox, filters and settings are those of ``tokenizer.apply_chat_template`` (transformers' own environment).
Two things differ. The clock stands still: some templates write today's date into the system prompt, and the same
rows must give the same tokens when a run is resumed on another day. And ``{% generation %}`` blocks put marks into
the text itself, so that their position is right inside macros and captured blocks too, where transformers' is not.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from sft_trainer.versions import template_environment

Message = dict[str, Any]
Content = Literal["left out", "none", "empty"]
"""What the content of a message is that has none."""
CallForm = tuple[bool, Content]
"""Whether the arguments of a call are JSON in a string, and what the content beside it is where there is none."""
Span = tuple[int, int]
"""Characters ``start`` to ``end`` (excluded) of a rendered conversation."""

FROZEN_CLOCK = datetime(2024, 7, 26)  # the day that Llama 3's own template falls back to without a clock

# Noncharacters: Unicode reserves them for use inside one program, so they are in no sensible text.
_MARK_START, _MARK_END = "\ufdd0", "\ufdd1"

# Tokens that end an assistant turn that calls a tool, where it ends otherwise than a plain answer does
# (Llama 3's built-in tools, gpt-oss, Gemma 4).
_TOOL_CALL_ENDS = ("<|eom_id|>", "<|call|>", "<|tool_response>")

# Variables by which templates choose between a generation prompt with and without an open reasoning block.
_THINKING_VARIABLES = ("enable_thinking", "thinking")

# What it is called with besides, which is not for rows to say.
_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")

_TEMPLATES_KEPT = 64
"""Sets of variables for which what was learnt of a template is kept."""

_PROBE_QUESTION, _PROBE_ANSWER, _PROBE_REASONING = "question", "probedanswer", "probedreasoning"
_ASKED: Message = {"role": "user", "content": _PROBE_QUESTION}
_ANSWERED: Message = {"role": "assistant", "content": _PROBE_ANSWER}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe": {"type": "string", "description": "probe"}}},
    },
}
_PROBE_ARGUMENT = "probedargument"
_PROBE_ARGUMENTS = {"probe": _PROBE_ARGUMENT}
_PROBE_CALL = {"id": "probecall", "type": "function", "function": {"name": "probe", "arguments": _PROBE_ARGUMENTS}}
_PROBE_CALLS: Message = {"role": "assistant", "tool_calls": [_PROBE_CALL]}
_WRITTEN_BY_PYTHON = (repr(_PROBE_ARGUMENTS), repr(json.dumps(_PROBE_ARGUMENTS)))


class TemplateRefusal(Exception):
    """A conversation that has no exact text or mask under this template; the message says why."""


class _GenerationMarks(jinja2.ext.Extension):
    """``{% generation %}`` … ``{% endgeneration %}`` puts marks around its text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute
    priority = 200  # after transformers' extension for the same tag, so that this one is used

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_MARK_START}{caller()}{_MARK_END}"


@dataclass(frozen=True)
class AssistantTurn:
    """How a template frames the last assistant message of a conversation."""

    lead: str
    """What stands between the generation prompt and the content, such as an empty reasoning block."""
    ends: tuple[str, ...]
    """Tokens that end the turn; empty only when the template has markers and writes none."""
    tail: str
    """What follows the end-of-turn token."""
    closing: str = ""
    """What each turn has behind that, up to the token at which a model stops; empty in most templates."""
    last: str = ""
    """The token with which the model ends a plain answer; empty where none is known."""
    next_turn: str = ""
    """Where the template writes no end-of-turn token, as GLM's: that which begins the turn of the user behind an
    answer, and at which the model stops; empty in most templates."""
    next_result: str = ""
    """The same behind calls of tools, where their results begin; empty, too, where these begin with no token, as those
    of Apertus: its turn goes on behind them."""

    def begun_next(self, message: Message) -> str:
        """What the model ends ``message`` with that the template does not write there, but in front of the next one."""
        return self.next_result if message.get("tool_calls") else self.next_turn

    @cached_property
    def end_pattern(self) -> re.Pattern[str]:
        """Matches any end-of-turn token."""
        return any_of(self.ends)


@dataclass(frozen=True)
class ChatTemplate:
    """One template with the tokens that it may write.

    ``special_tokens`` are the variables ``bos_token``, ``eos_token`` and so on, as in
    ``tokenizer.special_tokens_map``; ``added_tokens`` are all tokens that are matched as whole strings.
    """

    source: str
    special_tokens: Mapping[str, Any]
    added_tokens: tuple[str, ...]

    @cached_property
    def _plain(self) -> jinja2.Template:
        transformers_environment = template_environment(self.source)
        environment = transformers_environment.overlay()
        environment.globals = {**transformers_environment.globals, "strftime_now": FROZEN_CLOCK.strftime}
        template: jinja2.Template = environment.from_string(self.source)
        return template

    @cached_property
    def _marking(self) -> jinja2.Template:
        return self._plain.environment.overlay(extensions=[_GenerationMarks]).from_string(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        # Compiled templates cannot be sent to another process; the source can.
        return ChatTemplate, (self.source, dict(self.special_tokens), self.added_tokens)

    @cached_property
    def _given(self) -> "dict[str, ChatTemplate]":
        return {}

    def given(self, variables: Mapping[str, Any]) -> "ChatTemplate":
        """This template with ``variables`` set, wherever it is rendered.

        Raises TemplateRefusal where that would change what is not for a row to say.
        """
        if not variables:
            return self
        if wrong := next((name for name in variables if name in _ARGUMENTS or name in self.special_tokens), None):
            raise TemplateRefusal(
                f"column 'chat_template_kwargs' sets {wrong}, which is no variable of a row; remove it"
            )
        written = json.dumps(variables, sort_keys=True, default=str)
        if written not in self._given:
            if len(self._given) == _TEMPLATES_KEPT:
                self._given.clear()
            made = replace(self, special_tokens={**self.special_tokens, **variables})
            made.__dict__["_plain"] = self._plain  # what is compiled is the same
            if self.has_markers:
                made.__dict__["_marking"] = self._marking
            self._given[written] = made
        return self._given[written]

    def check_syntax(self) -> None:
        """Raises jinja2.TemplateSyntaxError when ``source`` is no valid template."""
        _ = self._plain

    @cached_property
    def has_markers(self) -> bool:
        """Whether the template itself says what the model generates."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    @cached_property
    def prompt_variants(self) -> tuple[dict[str, bool], ...]:
        """Template variables to try for the generation prompt, the default (none set) first."""
        known = [name for name in _THINKING_VARIABLES if re.search(rf"\b{name}\b", self.source)]
        return ({}, *({name: value} for name in known for value in (False, True)))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, as ``apply_chat_template(tokenize=False)`` gives it.

        Raises TemplateRefusal with the template's own reason when it raises.
        """
        return self._render(self._plain, messages, tools, generation_prompt, variables or {})

    def render_marked(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, list[Span]]:
        """The text without marks, and the spans of its ``{% generation %}`` blocks in order.

        Raises TemplateRefusal when the template's own code is disturbed by the marks (a block whose text is
        trimmed or measured later), or when blocks are nested.
        """
        marked = self._render(self._marking, messages, tools, False, {})
        text, spans = split_marks(marked)
        if text != self.render(messages, tools):
            raise TemplateRefusal(
                "the template changes the text of its {% generation %} blocks after writing it, so their position "
                "is unknown; put the markers around the final output"
            )
        return text, spans

    def _render(
        self,
        template: jinja2.Template,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        try:
            return template.render(
                messages=self._as_called(messages),
                tools=tools or None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **{**self.special_tokens, **variables},
            )
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            system = any(message["role"] == "system" for message in messages)
            hint = "; it may not allow the system turn: remove it" if system else ""
            raise TemplateRefusal(
                f"the chat template does not accept this conversation "
                f"({', '.join(message['role'] for message in messages) or 'no turns'}): "
                f"{type(error).__name__}: {error}{hint}"
            ) from error

    def _as_called(self, messages: Sequence[Message]) -> Sequence[Message]:
        """``messages`` with their tool calls in the form that the template takes."""
        if not any("tool_calls" in message for message in messages):
            return messages
        return [
            _call_written(message, *self._call_form) if "tool_calls" in message else message for message in messages
        ]

    @cached_property
    def _call_form(self) -> CallForm:
        """How calls are to be written for the template.

        DeepSeek's templates put arguments together with other text, and tell calls by a content that is none; that of
        Apertus wants a text, and that of LFM2.5 ends no call without one. What others write as it is given would be
        what Python prints of an object, which is no JSON.
        """
        forms: list[CallForm] = [
            *((as_text, content) for as_text in (False, True) for content in ("left out", "none")),
            # Last: some take an empty text for an answer, and write no call then.
            *((as_text, "empty") for as_text in (False, True)),
        ]
        ends: tuple[str, ...] = ()
        with suppress(TemplateRefusal):  # which is told where an answer is looked for
            ends = () if self._answer_turn.next_turn else self._answer_turn.ends
        taken: list[tuple[bool, bool, CallForm]] = []
        for form in forms:
            messages = [_ASKED, _call_written(_PROBE_CALLS, *form)]
            with suppress(Exception):  # as below
                text = self._plain.render(
                    messages=messages,
                    tools=[_PROBE_TOOL],
                    documents=None,
                    add_generation_prompt=False,
                    **self.special_tokens,
                )
                is_json = not any(written in text for written in _WRITTEN_BY_PYTHON)
                _, is_written, behind = text.rpartition(_PROBE_ARGUMENT)
                is_ended = not ends or (bool(is_written) and any(end in behind for end in ends))
                if is_json and is_ended:
                    return form
                taken.append((is_json, is_ended, form))
        return max(taken, key=itemgetter(0, 1))[2] if taken else forms[0]

    @cached_property
    def assistant_turn(self) -> AssistantTurn:
        """Learnt once, from a conversation of one question and one answer.

        Raises TemplateRefusal when the template cannot be used for training.
        """
        turn = self._answer_turn
        if not turn.next_turn:
            return turn
        result: Message = {"role": "tool", "content": _PROBE_ANSWER, "tool_call_id": _PROBE_CALL["id"]}
        begins = self._begins([_ASKED, {**_PROBE_CALLS, "content": ""}], result, [_PROBE_TOOL])
        ends = dict.fromkeys(filter(None, (turn.next_turn, begins)))
        return replace(turn, ends=tuple(ends), next_result=begins)

    @cached_property
    def _answer_turn(self) -> AssistantTurn:
        """``assistant_turn`` as far as it is known without calls, whose form goes by it."""
        text, tools = self._probed([_ASKED, _ANSWERED])
        prompt = next(iter(self.generation_prompts([_ASKED], tools, text)), "")
        before, found, after = text.rpartition(_PROBE_ANSWER)
        if not found:
            raise TemplateRefusal("it does not write the content of assistant messages")
        lead = before.removeprefix(prompt) if prompt else ""
        match = self._any_token.search(after)
        if match is None and not self.has_markers:
            if begins := self._begins([_ASKED, _ANSWERED], _ASKED, tools):
                return AssistantTurn(lead=lead, ends=(begins,), tail="", last=begins, next_turn=begins)
            raise TemplateRefusal(
                f"it writes no end-of-turn token of this tokenizer after an assistant message, only {after!r}, so "
                "the model would never learn to stop; set a model.chatTemplate that writes one (such as eos_token)"
            )
        if match is None:
            return AssistantTurn(lead=lead, ends=(), tail="")
        eos = self.special_tokens.get("eos_token")
        ends = [match.group(), *([eos] if eos else []), *_TOOL_CALL_ENDS]
        known = {*self.added_tokens}
        closing = self._closing(match.group(), after[match.end() :], tools) if eos in known - {match.group()} else ""
        return AssistantTurn(
            lead=lead,
            ends=tuple(dict.fromkeys(token for token in ends if token in known)),
            tail=after[match.end() :],
            closing=closing,
            last=str(eos) if closing else match.group(),
        )

    def _closing(self, end: str, tail: str, tools: list[Any] | None) -> str:
        """What stands behind ``end`` up to ``eos_token`` in every turn, as in those of Cohere's newer models; empty
        where the last turn alone has it in its ``tail``, as in Phi-4's: the model does not write it."""
        before, eos, _ = tail.partition(self.special_tokens["eos_token"])
        if not eos:
            return ""
        try:
            text = self.render([_ASKED, _ANSWERED, _ASKED], tools)
        except TemplateRefusal:
            return ""
        behind = text.partition(_PROBE_ANSWER)[2].partition(end)[2]
        return before + eos if behind.startswith(before + eos) else ""

    def _begins(self, messages: list[Message], following: Message, tools: list[Any] | None) -> str:
        """The token right behind ``messages`` with which the one that is ``following`` begins; empty where none does,
        or one at which no model stops: that of the beginning of a text."""
        try:
            before, text = self.render(messages, tools), self.render([*messages, following], tools)
        except TemplateRefusal:
            return ""
        if not text.startswith(before):
            return ""
        found = self._any_token.match(text, len(before))
        return found.group() if found and found.group() != self.special_tokens.get("bos_token") else ""

    @cached_property
    def _any_token(self) -> re.Pattern[str]:
        # Gemma's line ends and runs of spaces are added tokens, too; none of them ends a turn.
        return any_of([token for token in self.added_tokens if token.strip()])

    @cached_property
    def no_reasoning(self) -> str:
        """What a generation prompt ends with to say that there is none, where a conversation has nothing of it before
        an answer: an empty block, as Gemma 4's larger models have it. Empty in most templates.

        Not what opens a block that the model is to close (DeepSeek-R1): the answer would be trained as reasoning.
        """
        try:
            prompt, plain = self.render([_ASKED], generation_prompt=True), self.render([_ASKED, _ANSWERED])
        except TemplateRefusal:
            return ""
        before, found, _ = plain.rpartition(_PROBE_ANSWER)
        said = prompt.removeprefix(before)
        if not found or not said or said == prompt:
            return ""
        # Some write reasoning beside calls alone, as those that Gemma 4 came with.
        reasons = any(self._reasons_in(said, before, message) for message in (_ANSWERED, _PROBE_CALLS))
        return said if reasons else ""

    def _reasons_in(self, said: str, before: str, message: Message) -> bool:
        """Whether reasoning of ``message``, behind a question, stands between ``before`` and the rest in what
        ``said`` is, but for white space."""
        reasoned = {**message, "thinking": _PROBE_REASONING, "reasoning_content": _PROBE_REASONING}
        try:
            plain, other = self.render([_ASKED, message]), self.render([_ASKED, reasoned])
        except TemplateRefusal:
            return False
        rest = plain.removeprefix(before)
        if rest == plain or not (other.startswith(before) and other.endswith(rest)):
            return False
        block = other[len(before) : len(other) - len(rest)]
        without = block.replace(_PROBE_REASONING, "", 1)
        return without != block and "".join(without.split()) == "".join(said.split())

    @cached_property
    def writes_tools(self) -> bool:
        """Whether it says beside one question and one answer which tools there are; many templates know of none, and
        leave them out without a word."""
        messages = [_ASKED, _ANSWERED]
        try:
            return self.render(messages) != self.render(messages, [_PROBE_TOOL])
        except TemplateRefusal:
            return True

    def _probed(self, messages: list[Message]) -> tuple[str, list[Any] | None]:
        """The text of ``messages``, and the tools that it took: one where the template takes no row without any.

        Templates called ``tool_use`` are such. Raises TemplateRefusal with the reason of the first try.
        """
        try:
            return self.render(messages), None
        except TemplateRefusal:
            with suppress(TemplateRefusal):
                return self.render(messages, [_PROBE_TOOL]), [_PROBE_TOOL]
            raise

    def generation_prompts(self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str) -> Iterator[str]:
        """Those renders of ``messages`` with a generation prompt that ``text`` begins with, default first."""
        for variables in self.prompt_variants:
            prompt = self.render(messages, tools, generation_prompt=True, variables=variables)
            if text.startswith(prompt):
                yield prompt


def _call_written(message: Message, as_text: bool, content: Content) -> Message:
    """``message``, which calls tools, with their arguments as text if asked for. Where ``content`` is to be none an
    empty one is, too: many data sets write that beside calls."""
    written = message
    if content == "none":
        written = {**message, "content": message.get("content") or None}
    elif content == "empty":
        written = {"content": "", **message}
    if not as_text:
        return written
    return {**written, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Matches any of ``tokens``, the longest first; nothing when there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def split_marks(marked: str) -> tuple[str, list[Span]]:
    """``marked`` without its marks, and the spans between them. Raises TemplateRefusal when they are nested."""
    pieces = re.split(f"([{_MARK_START}{_MARK_END}])", marked)
    text: list[str] = []
    spans: list[Span] = []
    position, opened = 0, -1
    for piece in pieces:
        if piece == _MARK_START and opened < 0:
            opened = position
        elif piece == _MARK_END and opened >= 0:
            spans.append((opened, position))
            opened = -1
        elif piece in (_MARK_START, _MARK_END):
            raise TemplateRefusal("the {% generation %} blocks of the template are nested or lost an end")
        else:
            text.append(piece)
            position += len(piece)
    return "".join(text), spans
