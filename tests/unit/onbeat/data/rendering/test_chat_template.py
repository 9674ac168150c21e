"""A chat template is a stranger's program: what it costs is bounded, and its callers always have an answer."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from contracts.environments.messages import Message
from onbeat.data.rendering import chat_template, template_cage
from onbeat.data.rendering.chat_template import ChatTemplate, TemplateEnded, TemplateRefuses
from onbeat.data.rendering.single_turn import RowMessages
from onbeat.data.rendering.template import TemplateRenderer
from onbeat.data.rendering.template_cage import TemplateCage, TemplateProcess
from onbeat.data.rendering.template_process import MEMORY_MB
from tests.refusals import refusal_of
from tests.unit.onbeat.data.rendering.chat_models import CHATML, chat_tokenizer

ROWS = [{"role": "user", "content": "Hello."}]
LOOPS = "".join(f"{{% for i{depth} in range(99999) %}}" for depth in range(4)) + 4 * "{% endfor %}"
AGAIN = "{% for i in range(9) %}{{ again(n - 1) if n else '' }}{% endfor %}"
RECURSION = "{% macro again(n) %}" + AGAIN + "{% endmacro %}{{ again(99) }}"
FILTERS = "{% for i in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}"
SQUARES = (
    "{% set n = namespace(value=999999999) %}{% for i in range(24) %}{% set n.value = n.value * n.value %}"
    "{% endfor %}{{ n.value % 7 }}"
)
"""Each product is one instruction of Python, and the last ones take minutes."""
POWER = "{{ (9 ** 9999999 * 9 ** 9999999) % 7 }}"
"""Jinja computes it while it compiles."""
COSTLY = {"loops": LOOPS, "recursion": RECURSION, "filters": FILTERS, "squares": SQUARES, "power": POWER}
LARGE = {
    "constant": "{{ 'a' * 2000000000 }}",
    "doubled": "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "list": "{{ (range(99999) | list * 99999) | length }}",
    "text": "{{ messages[0]['content'] * 12000000 }}",
}


@pytest.fixture(autouse=True)
def shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LONGEST_S", 0.3)


def own_process(template: ChatTemplate) -> TemplateProcess:
    (process,) = template._used.values()
    return process


@pytest.mark.parametrize("name", COSTLY)
def test_a_template_without_an_end_is_ended_and_the_next_one_is_written(name: str) -> None:
    with pytest.raises(TemplateEnded, match=r"longer than 0\.3 s of a processor"):
        ChatTemplate(chat_tokenizer(COSTLY[name])).write(ROWS, opens_turn=True)
    assert ChatTemplate(chat_tokenizer(CHATML)).write(ROWS, opens_turn=False).endswith("user\nHello.<|im_end|>\n")


@pytest.mark.parametrize("name", LARGE)
def test_memory_that_a_template_takes_is_not_this_process_s_and_is_bounded(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateEnded, match=rf"more memory than {MEMORY_MB} MiB|a text of [0-9]+ MiB|longer than"):
        ChatTemplate(chat_tokenizer(LARGE[name])).write(ROWS, opens_turn=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "KiB"


def test_other_threads_go_on_while_a_template_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease is renewed by a thread: a product of large numbers in this process held it for half a minute."""
    monkeypatch.setattr(chat_template, "LONGEST_S", 2.0)
    template = ChatTemplate(chat_tokenizer(SQUARES))
    ends: list[TemplateEnded] = []

    def write() -> None:
        try:
            template.write(ROWS, opens_turn=True)
        except TemplateEnded as error:
            ends.append(error)

    waiting = threading.Thread(target=write)
    waiting.start()
    gaps: list[float] = []
    seen_s = time.monotonic()
    while waiting.is_alive():
        time.sleep(0.01)
        gaps.append(time.monotonic() - seen_s)
        seen_s = time.monotonic()
    assert len(ends) == 1
    assert len(gaps) > 10
    assert max(gaps) < 1.5


def test_a_template_that_always_goes_beyond_a_bound_is_ended_each_time_and_leaves_no_process() -> None:
    template = ChatTemplate(chat_tokenizer(SQUARES))
    for _ in range(3):
        with pytest.raises(TemplateEnded):
            template.write(ROWS, opens_turn=True)
    assert own_process(template).pid is None


def test_a_killed_process_is_started_again_and_answers_the_same() -> None:
    template = ChatTemplate(chat_tokenizer(CHATML))
    before = template.write(ROWS, opens_turn=True)
    for victim in ("child", "keeper"):
        keeper = own_process(template).pid
        assert keeper is not None
        os.kill(
            psutil.Process(keeper).children(recursive=True)[-1].pid if victim == "child" else keeper, signal.SIGKILL
        )
        assert template.write(ROWS, opens_turn=True) == before


def test_a_stopped_process_lets_its_caller_go_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(chat_tokenizer(CHATML))
    before = template.write(ROWS, opens_turn=True)
    monkeypatch.setattr(template_cage, "ANSWER_TIMEOUT_S", 0.5)
    keeper = own_process(template).pid
    assert keeper is not None
    for process in psutil.Process(keeper).children(recursive=True):
        process.suspend()
    with pytest.raises(TemplateEnded, match="took more than"):
        template.write(ROWS, opens_turn=True)
    monkeypatch.undo()
    assert template.write(ROWS, opens_turn=True) == before


def test_many_threads_share_a_template_and_each_gets_its_own_text() -> None:
    template = ChatTemplate(chat_tokenizer(CHATML))
    texts: dict[int, list[str]] = {}

    def write(number: int) -> None:
        rows = [[{"role": "user", "content": f"{number}/{place}"}] for place in range(20)]
        texts[number] = [
            *template.write_all(rows[:10], opens_turn=True),
            *(template.write(r, opens_turn=True) for r in rows[10:]),
        ]

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        assert all(f"user\n{number}/{place}<|im_end|>" in texts[number][place] for place in range(20))


def test_the_process_is_shared_and_ends_with_the_last_that_refers_to_it() -> None:
    first, second = ChatTemplate(chat_tokenizer(CHATML)), ChatTemplate(chat_tokenizer(CHATML))
    first.write(ROWS, opens_turn=True)
    second.write(ROWS, opens_turn=True)
    process = own_process(first)
    keeper, folder = process.pid, Path(process._living.folder)
    assert keeper is not None
    assert own_process(second) is process
    assert folder.is_dir()
    del first, second, process
    gc.collect()
    ends_s = time.monotonic() + 30.0
    while (psutil.pid_exists(keeper) or folder.exists()) and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert not psutil.pid_exists(keeper)
    assert not folder.exists()


WRITES = """
import os, sys
from onbeat.data.rendering.chat_template import ChatTemplate
from tests.unit.onbeat.data.rendering.chat_models import CHATML, chat_tokenizer
template = ChatTemplate(chat_tokenizer(CHATML))
template.write([{"role": "user", "content": "a"}], opens_turn=True)
(process,) = template._used.values()
print(process.pid, process._living.folder, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process is ended a moment later")
@pytest.mark.parametrize("end", ["returns", "killed"])
def test_a_process_that_ends_however_leaves_no_template_s_process_behind(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", WRITES, end], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if end == "returns" else -signal.SIGKILL), done.stderr
    keeper, folder = done.stdout.split()
    ends_s = time.monotonic() + 30.0
    while _lives(int(keeper)) and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert not _lives(int(keeper))
    assert end == "killed" or not Path(folder).exists()


def _lives(pid: int) -> bool:
    """Whether it runs: a container without an init leaves it unreaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_conversations_of_one_call_are_answered_in_order_and_the_refused_one_is_named() -> None:
    refuses = "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    picky = refuses + "{{ messages[0]['content'] }}"
    template = ChatTemplate(chat_tokenizer(picky))
    rows = [[{"role": "user", "content": f"{place}" * 1000}] for place in range(3000)]
    assert template.write_all(rows, opens_turn=True) == [row[0]["content"] for row in rows]
    rows[2500][0]["content"] = "no"
    with pytest.raises(TemplateRefuses, match=r"^not that$") as error:
        template.write_all(rows, opens_turn=True)
    assert error.value.place == 2500


def test_conversations_that_are_slow_together_are_ended_though_each_is_fast_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template, "MEAN_S", 0.0)
    slow = "{% for i in range(99999) %}{{ i }}{% endfor %}"
    with pytest.raises(TemplateEnded, match=r"200 conversations take longer than 0\.3 s"):
        ChatTemplate(chat_tokenizer(slow)).write_all([ROWS] * 200, opens_turn=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include '/etc/passwd' %}",
        "{{ 1 / 0 }}",
        "{{ (",
        "{{ x.y }}",
    ],
)
def test_a_template_s_own_errors_are_refusals_and_its_process_lives_on(template: str) -> None:
    written = ChatTemplate(chat_tokenizer(template))
    with pytest.raises(TemplateRefuses) as error:
        written.write(ROWS, opens_turn=True)
    assert str(error.value)
    keeper = own_process(written).pid
    with pytest.raises(TemplateRefuses):
        written.write(ROWS, opens_turn=True)
    assert own_process(written).pid == keeper


@pytest.mark.skipif(sys.platform != "linux", reason="the locks are Linux's")
def test_a_template_that_gets_out_of_its_sandbox_opens_nothing_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TemplateCage, "module", "tests.unit.onbeat.data.rendering.escaped_process")
    monkeypatch.setenv("ONBEAT_API_KEY", "secret")
    (tmp_path / "key").write_text("secret")

    def refusal(template: str) -> str:
        with pytest.raises(TemplateRefuses) as error:
            ChatTemplate(chat_tokenizer(template)).write(ROWS, opens_turn=True)
        return str(error.value)

    for call in (f"read('{tmp_path}/key')", "read('/etc/passwd')", f"write('{tmp_path}/new')", "start()"):
        assert "denied" in refusal(f"{{{{ {call} }}}}"), call
    assert "denied" in refusal("{{ connect() }}") or "unreachable" in refusal("{{ connect() }}")
    assert not (tmp_path / "new").exists()
    seen = ChatTemplate(chat_tokenizer("{{ variables() }}")).write(ROWS, opens_turn=True)
    assert "PATH" not in seen
    assert "ONBEAT" not in seen


def test_text_that_cannot_be_sent_is_a_refusal() -> None:
    template = ChatTemplate(chat_tokenizer(CHATML))
    for content in ("\ud800", 2**80, object()):
        with pytest.raises(TemplateRefuses, match="can't be written"):
            template.write([{"role": "user", "content": content}], opens_turn=True)
    with pytest.raises(TemplateRefuses, match="one message or more"):
        template.write([], opens_turn=True)


@pytest.mark.parametrize("template", [LOOPS, "{{ raise_exception('no') }}"], ids=["loops", "raises"])
def test_a_job_whose_prompts_it_would_write_fails_by_the_models_name(template: str) -> None:
    with pytest.raises((TemplateEnded, TemplateRefuses)) as of_questions:
        RowMessages(chat_tokenizer(template)).prompts([[Message(role="user", content="?")]], system="", variables={})
    error = chat_template.invalid(of_questions.value, where="rows.jsonl:7")
    assert error.field == "model.path"
    assert error.problem.startswith("rows.jsonl:7: the model's chat template ")
    assert error.cure
    with refusal_of("model.path"):
        TemplateRenderer(chat_tokenizer(template))
