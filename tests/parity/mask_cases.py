"""Conversations whose trained text was marked by hand, ⟦like this⟧, for many families of chat templates."""

import re
from dataclasses import dataclass
from typing import Any

from sft_trainer.data.masks import TrainOn

LAST: TrainOn = "lastAssistantMessage"
ALL: TrainOn = "allAssistantMessages"
EVERY: TrainOn = "allTokens"


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


TOOLS = [{"type": "function", "function": {"name": "sky", "parameters": {}}}]
TOOLS_TEXT = '{"type": "function", "function": {"name": "sky", "parameters": {}}}'


@dataclass(frozen=True)
class MaskCase:
    """A conversation and, in ``expected``, its text with the trained spans in ⟦ ⟧."""

    name: str
    family: str
    messages: list[dict[str, Any]]
    expected: str
    train_on: TrainOn = LAST
    tools: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        return re.sub("[⟦⟧]", "", self.expected)

    @property
    def trained_characters(self) -> list[bool]:
        """For each character of ``text`` whether it is trained."""
        inside, flags = False, []
        for character in self.expected:
            if character in "⟦⟧":
                inside = character == "⟦"
            else:
                flags.append(inside)
        return flags


TWO = [user("One?"), assistant("First."), user("Two?"), assistant("Second.")]

CASES = [
    # ChatML, default system prompt
    MaskCase(
        "one turn",
        "chatml",
        [user("2+2?"), assistant("four")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦four<|im_end|>⟧\n",
    ),
    MaskCase(
        "last of two turns",
        "chatml",
        [system("Be kind."), *TWO],
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\nFirst.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Second.<|im_end|>⟧\n",
    ),
    MaskCase(
        "both of two turns",
        "chatml",
        [system("Be kind."), *TWO],
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\n⟦First.<|im_end|>⟧\n<|im_start|>user\nTwo?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Second.<|im_end|>⟧\n",
        ALL,
    ),
    MaskCase(
        "emoji, scripts and white space at the borders",
        "chatml",
        [user("🙂"), assistant("🙂 你好\n\n  ünïcödé 👩‍👩‍👧 \n")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n🙂<|im_end|>\n"
        "<|im_start|>assistant\n⟦🙂 你好\n\n  ünïcödé 👩‍👩‍👧 \n<|im_end|>⟧\n",
    ),
    MaskCase(
        "an answer whose first word may share a token with the line end before it",
        "chatml",
        [user("2+2?"), assistant("The answer is four. The")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n⟦The answer is four. The<|im_end|>⟧\n",
    ),
    MaskCase(
        "white space only",
        "chatml",
        [user(" \n"), assistant("\n\n \t  ")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n \n<|im_end|>\n"
        "<|im_start|>assistant\n⟦\n\n \t  <|im_end|>⟧\n",
    ),
    MaskCase(
        "empty answer",
        "chatml",
        [user("Say nothing."), assistant("")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nSay nothing.<|im_end|>\n"
        "<|im_start|>assistant\n⟦<|im_end|>⟧\n",
    ),
    MaskCase(
        "answer that repeats the question",
        "chatml",
        [user("echo"), assistant("echo"), user("echo"), assistant("echo")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\necho<|im_end|>\n"
        "<|im_start|>assistant\n⟦echo<|im_end|>⟧\n<|im_start|>user\necho<|im_end|>\n"
        "<|im_start|>assistant\n⟦echo<|im_end|>⟧\n",
        ALL,
    ),
    MaskCase(
        "tool call and answer",
        "chatml",
        [user("Sky?"), assistant(None, **call("sky", city="Rome")), tool("sunny"), assistant("It is sunny.")],
        f"<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n<tools>\n{TOOLS_TEXT}\n</tools><|im_end|>\n"
        "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n"
        '⟦<tool_call>\n{"name": "sky", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦It is sunny.<|im_end|>⟧\n",
        ALL,
        TOOLS,
    ),
    MaskCase(
        "tool call as the last message, with text before it",
        "chatml",
        [user("Sky?"), assistant("Let me see.", **call("sky", n=1))],
        f"<|im_start|>system\nYou are a helpful assistant.\n\n# Tools\n<tools>\n{TOOLS_TEXT}\n</tools><|im_end|>\n"
        "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n"
        '⟦Let me see.\n<tool_call>\n{"name": "sky", "arguments": {"n": 1}}\n</tool_call><|im_end|>⟧\n',
        LAST,
        TOOLS,
    ),
    MaskCase(
        "turns behind the last answer are left out",
        "chatml",
        [user("One?"), assistant("First."), user("never read")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦First.<|im_end|>⟧\n",
    ),
    MaskCase(
        "flags choose the first answer",
        "chatml",
        [user("One?"), assistant("First.", train=True), user("Two?"), assistant("Second.", weight=0)],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦First.<|im_end|>⟧\n",
    ),
    MaskCase(
        "a flag excludes the first of two",
        "chatml",
        [user("One?"), assistant("First.", train=False), user("Two?"), assistant("Second.")],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nFirst.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n⟦Second.<|im_end|>⟧\n",
        ALL,
    ),
    # Qwen3: reasoning in the newest answer only
    MaskCase(
        "no reasoning: an empty block is written and trained",
        "qwen3",
        [user("2+2?"), assistant("four")],
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nfour<|im_end|>⟧\n",
    ),
    MaskCase(
        "reasoning inside the content",
        "qwen3",
        [user("2+2?"), assistant("<think>\nAdd.\n</think>\n\nfour")],
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nAdd.\n</think>\n\nfour<|im_end|>⟧\n",
    ),
    MaskCase(
        "reasoning of its own field, history without it",
        "qwen3",
        [
            user("One?"),
            assistant("First.", reasoning_content="Hm."),
            user("Two?"),
            assistant("Second.", reasoning="So."),
        ],
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nFirst.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nSo.\n</think>\n\nSecond.<|im_end|>⟧\n",
    ),
    MaskCase(
        "both turns without reasoning",
        "qwen3",
        TWO,
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦First.<|im_end|>⟧\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nSecond.<|im_end|>⟧\n",
        ALL,
    ),
    MaskCase(
        "reasoning kept between tool calls",
        "qwen3",
        [
            user("Sky?"),
            assistant("", reasoning_content="Ask.", **call("sky")),
            tool("sunny"),
            assistant("Sunny.", reasoning_content="Clear."),
        ],
        f"<|im_start|>system\n# Tools\n{TOOLS_TEXT}<|im_end|>\n<|im_start|>user\nSky?<|im_end|>\n"
        '<|im_start|>assistant\n⟦<think>\nAsk.\n</think>\n\n<tool_call>\n{"name": "sky", "arguments": {}}\n'
        "</tool_call><|im_end|>⟧\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nClear.\n</think>\n\nSunny.<|im_end|>⟧\n",
        ALL,
        TOOLS,
    ),
    # Llama 3: trimmed content, a clock
    MaskCase(
        "trimmed content and a clock that stands still",
        "llama3",
        [system("Be kind."), user(" Hi \n"), assistant("  Hello 🙂 \n")],
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello 🙂<|eot_id|>⟧",
    ),
    MaskCase(
        "both of two turns",
        "llama3",
        TWO,
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦First.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Second.<|eot_id|>⟧",
        ALL,
    ),
    MaskCase(
        "a tool call ends with a token of its own",
        "llama3",
        [user("Sky?"), assistant(None, **call("sky", city="Rome")), tool("sunny"), assistant("Sunny.")],
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nSky?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '⟦{"name": "sky", "parameters": {"city": "Rome"}}<|eom_id|>⟧'
        "<|start_header_id|>ipython<|end_header_id|>\n\nsunny<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Sunny.<|eot_id|>⟧",
        ALL,
        TOOLS,
    ),
    MaskCase(
        "empty answer",
        "llama3",
        [user("Say nothing."), assistant(" ")],
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nSay nothing.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦<|eot_id|>⟧",
    ),
    # Gemma
    MaskCase(
        "both of two turns",
        "gemma",
        TWO,
        "<bos><start_of_turn>user\nOne?<end_of_turn>\n<start_of_turn>model\n⟦First.<end_of_turn>⟧\n"
        "<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n⟦Second.<end_of_turn>⟧\n",
        ALL,
    ),
    MaskCase(
        "trimmed content, the word model in it",
        "gemma",
        [user("model\n"), assistant("\n你好 model\n你好  ")],
        "<bos><start_of_turn>user\nmodel<end_of_turn>\n<start_of_turn>model\n⟦你好 model\n你好<end_of_turn>⟧\n",
    ),
    # Phi-3
    MaskCase(
        "both of two turns and the eos behind them",
        "phi3",
        [system("Be kind."), *TWO],
        "<|system|>\nBe kind.<|end|>\n<|user|>\nOne?<|end|>\n<|assistant|>\n⟦First.<|end|>⟧\n"
        "<|user|>\nTwo?<|end|>\n<|assistant|>\n⟦Second.<|end|>⟧\n<|endoftext|>",
        ALL,
    ),
    MaskCase(
        "empty answer",
        "phi3",
        [user("Say nothing."), assistant("")],
        "<|user|>\nSay nothing.<|end|>\n<|assistant|>\n⟦<|end|>⟧\n<|endoftext|>",
    ),
    # Mistral
    MaskCase(
        "both of two turns, the space is the model's",
        "mistral",
        [system("Be kind."), *TWO],
        "<s>[INST] Be kind.\n\nOne?[/INST]⟦ First.</s>⟧[INST] Two?[/INST]⟦ Second.</s>⟧",
        ALL,
    ),
    MaskCase(
        "emoji at both borders",
        "mistral",
        [user("🙂"), assistant("🙂 yes 🙂")],
        "<s>[INST] 🙂[/INST]⟦ 🙂 yes 🙂</s>⟧",
    ),
    # DeepSeek
    MaskCase(
        "both of two turns",
        "deepseek",
        [system("Be kind."), *TWO],
        "<｜begin▁of▁sentence｜>Be kind.<｜User｜>One?<｜Assistant｜>⟦First.<｜end▁of▁sentence｜>⟧"
        "<｜User｜>Two?<｜Assistant｜>⟦Second.<｜end▁of▁sentence｜>⟧",
        ALL,
    ),
    MaskCase(
        "white space at the borders",
        "deepseek",
        [user("a "), assistant(" b ")],
        "<｜begin▁of▁sentence｜><｜User｜>a <｜Assistant｜>⟦ b <｜end▁of▁sentence｜>⟧",
    ),
    # Gemma 4
    MaskCase(
        "the last prompt says that there is no reasoning",
        "gemma4",
        TWO,
        "<|turn>user\nOne?<turn|>\n<|turn>model\nFirst.<turn|>\n"
        "<|turn>user\nTwo?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>⟦Second.<turn|>⟧\n",
    ),
    MaskCase(
        "a call ends with the token that begins what the tool says",
        "gemma4",
        [user("Sky?"), assistant("", **call("sky"))],
        "<|turn>user\nSky?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
        "⟦<|tool_call>call:sky<tool_call|><|tool_response>⟧",
    ),
    MaskCase(
        "an answer after a call has no prompt",
        "gemma4",
        [user("Sky?"), assistant("", **call("sky")), tool("blue"), assistant("Blue.")],
        "<|turn>user\nSky?<turn|>\n<|turn>model\n<|tool_call>call:sky<tool_call|>"
        "<|tool_response>blue<tool_response|>⟦Blue.<turn|>⟧\n",
    ),
    # Command R7B
    MaskCase(
        "two tokens end each answer, and a model stops at the second",
        "cohere",
        TWO,
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>One?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        "⟦<|START_RESPONSE|>First.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Two?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        "⟦<|START_RESPONSE|>Second.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>⟧",
        ALL,
    ),
    MaskCase(
        "a call has the second alone",
        "cohere",
        [user("Sky?"), assistant("", **call("sky"))],
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Sky?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        '⟦<|START_ACTION|>{"name": "sky", "arguments": {}}<|END_ACTION|><|END_OF_TURN_TOKEN|>⟧',
    ),
    # GLM 4.5
    MaskCase(
        "what begins the next turn ends an answer, also the last one",
        "glm",
        TWO,
        "[gMASK]<sop><|user|>\nOne?<|assistant|>⟦\n<think></think>\nFirst.<|user|>⟧"
        "\nTwo?<|assistant|>⟦\n<think></think>\nSecond.<|user|>⟧",
        ALL,
    ),
    MaskCase(
        "and so does what begins the words of a tool behind its call",
        "glm",
        [user("Sky?"), assistant("", **call("sky")), tool("blue"), assistant("Blue.", reasoning_content="Hm.")],
        "[gMASK]<sop><|user|>\nSky?<|assistant|>"
        '⟦\n<think></think>\n<tool_call>{"name": "sky", "arguments": {}}</tool_call><|observation|>⟧'
        "\nblue<|assistant|>⟦\n<think>Hm.</think>\nBlue.<|user|>⟧",
        ALL,
    ),
    MaskCase(
        "a call that is the last word ends so as well",
        "glm",
        [user("Sky?"), assistant("", **call("sky"))],
        "[gMASK]<sop><|user|>\nSky?<|assistant|>"
        '⟦\n<think></think>\n<tool_call>{"name": "sky", "arguments": {}}</tool_call><|observation|>⟧',
    ),
    MaskCase(
        "also where all is trained",
        "glm",
        [user("One?"), assistant("First.")],
        "⟦[gMASK]<sop><|user|>\nOne?<|assistant|>\n<think></think>\nFirst.<|user|>⟧",
        EVERY,
    ),
    # gpt-oss
    MaskCase(
        "reasoning and answer are two messages of one turn",
        "harmony",
        [user("2+2?"), assistant("four", reasoning_content="Add.")],
        "<|start|>user<|message|>2+2?<|end|><|start|>assistant"
        "⟦<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>⟧",
    ),
    MaskCase(
        "a tool call ends with a token of its own",
        "harmony",
        [user("Sky?"), assistant("", **call("sky", city="Rome"))],
        "<|start|>user<|message|>Sky?<|end|><|start|>assistant"
        '⟦ to=sky<|channel|>commentary<|message|>{"city": "Rome"}<|call|>⟧',
    ),
    # Generation markers
    MaskCase(
        "marked inside a macro, end-of-turn token outside the markers",
        "marked",
        TWO,
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n⟦First.<|im_end|>⟧\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n⟦Second.<|im_end|>⟧\n",
        ALL,
    ),
    MaskCase(
        "marked: the last turn only, in two blocks",
        "marked",
        [user("One?"), assistant("First."), user("Two?"), assistant("Second.", reasoning_content="So.")],
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nFirst.<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n⟦<think>So.</think>Second.<|im_end|>⟧\n",
    ),
    MaskCase(
        "marked: an empty answer still ends",
        "marked",
        [user("Say nothing."), assistant("")],
        "<|im_start|>user\nSay nothing.<|im_end|>\n<|im_start|>assistant\n⟦<|im_end|>⟧\n",
    ),
    MaskCase(
        "marked: the last character has no token of its own",
        "marked",
        [user("🙂"), assistant("🙂")],
        "<|im_start|>user\n🙂<|im_end|>\n<|im_start|>assistant\n⟦🙂<|im_end|>⟧\n",
    ),
]
