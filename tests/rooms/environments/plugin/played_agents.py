"""Agents of a package that is installed beside Onbeat, written with the plain `openai` client and with httpx."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from onbeat.environments.adapters.secret_table import SecretTable
from onbeat.environments.author import Episode, Message, Outcome


def client_of(episode: Episode, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, **options)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def echo(episode: Episode, *, turns: int = 2) -> Outcome:
    """Plays what the environment `echo` plays."""
    client = client_of(episode)
    number = str(episode.seed % 10)
    said: list[Any] = [user(f"say {number}")]
    heard: list[str] = []
    for _ in range(turns):
        answer = client.chat.completions.create(model=episode.model, messages=said).choices[0].message
        heard.append(answer.content or "")
        said += [answer, user(" ".join(heard))]
    return Outcome(reward=float(heard.count(number)), metrics={"right": heard.count(number)})


async def echo_later(episode: Episode) -> float:
    """The same by the asynchronous client, in a stream, with everything that may be asked."""
    client = openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
    (model,) = [one.id async for one in client.models.list()]
    said: list[Any] = [user("hello")]
    texts: list[str] = []
    for _ in range(2):
        stream = await client.chat.completions.create(
            model=model, messages=said, stream=True, stream_options={"include_usage": True}, n=1, temperature=1.0
        )
        pieces = [piece async for piece in stream]
        assert pieces[-1].usage is not None
        texts.append(pieces[0].choices[0].delta.content or "")
        said += [{"role": "assistant", "content": texts[-1]}, user(f"{pieces[-1].usage.completion_tokens} tokens")]
    return float(len(" ".join(texts)))


def calls(episode: Episode) -> float:
    """Has a tool, and asks for log-probs."""
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    said: list[Any] = [user("add 1 and 2")]
    client = client_of(episode)
    first = client.chat.completions.create(
        model=episode.model, messages=said, tools=[tool], logprobs=True, max_completion_tokens=8, seed=None
    )
    answer = first.choices[0]
    assert answer.logprobs is not None
    assert answer.logprobs.content is not None
    assert answer.message.tool_calls
    assert first.usage is not None
    said.append(answer.message.model_dump())
    for call in answer.message.tool_calls:
        found = f"{call.function.name} {call.function.arguments} {answer.finish_reason}"
        said.append({"role": "tool", "tool_call_id": call.id, "content": found})
    second = client.chat.completions.create(model=episode.model, messages=said, tools=[tool])
    tokens = [entry.token for entry in answer.logprobs.content]
    assert tokens == [f"token_id:{place}" for place in range(first.usage.completion_tokens)]
    return 0.5 + (second.choices[0].message.content == "3")


def by_tokens(episode: Episode) -> float:
    """Tokens in and out; rewards the second token of its second turn."""
    prompt = [1, 2, 3]
    with httpx.Client(headers={"authorization": f"Bearer {episode.api_key}"}) as http:
        for _ in range(2):
            body = {"model": episode.model, "token_ids": prompt, "sampling_params": {"logprobs": 1}}
            url = episode.base_url.removesuffix("/v1") + "/inference/v1/generate"
            answer = http.post(url, json=body, timeout=None).raise_for_status().json()["choices"][0]
            assert len(answer["logprobs"]["content"]) == len(answer["token_ids"])
            assert answer["weight_versions"] == [{"start": 0, "end": len(answer["token_ids"]), "version": "3"}]
            prompt = [*prompt, *answer["token_ids"], 7, 7]
    return float(answer["token_ids"][1])


def secret_table(episode: Episode) -> Outcome:
    """Plays what the environment of that name plays."""
    table, client = SecretTable(), client_of(episode)
    said: list[Any] = [user(str(table.reset(episode.task, episode.seed).messages))]
    while True:
        answer = client.chat.completions.create(model=episode.model, messages=said).choices[0].message
        reply = table.step(Message(role="assistant", content=answer.content or ""), turn=0)
        if reply.done:
            return Outcome(reward=reply.reward, metrics=reply.metrics)
        said += [answer, user(str(reply.messages))]


def secret_tokens(episode: Episode, *, tokenizer: str) -> Outcome:
    """The same by tokens, with the model's tokenizer of its own."""
    vocabulary: dict[str, int] = json.loads(Path(tokenizer).read_text())["model"]["vocab"]
    texts = {token: text if len(text) == 1 else "" for text, token in vocabulary.items()}
    table = SecretTable()
    prompt = [vocabulary[letter] for letter in str(table.reset(episode.task, episode.seed).messages)]
    url = episode.base_url.removesuffix("/v1") + "/inference/v1/generate"
    with httpx.Client(headers={"authorization": f"Bearer {episode.api_key}"}, timeout=None) as http:
        while True:
            body = {"model": episode.model, "token_ids": prompt, "sampling_params": {"logprobs": 1}}
            turn = http.post(url, json=body).raise_for_status().json()["choices"][0]["token_ids"]
            content = "".join(texts[token] for token in turn)
            reply = table.step(Message(role="assistant", content=content), turn=0)
            if reply.done:
                return Outcome(reward=reply.reward, metrics=reply.metrics)
            prompt = [*prompt, *turn, *(vocabulary[letter] for letter in str(reply.messages))]


def faulty(episode: Episode) -> Any:
    """Does what its task says."""
    return globals()[f"do_{episode.task['act']}"](episode, client_of(episode, max_retries=0))


def rewriting(episode: Episode) -> Any:
    """The same, and says that it rewrites."""
    return faulty(episode)


rewriting.rewrites = True  # pyright: ignore[reportFunctionMemberAccess]


def in_parallel(episode: Episode) -> Any:
    """The same, and asks with several histories at a time."""
    return faulty(episode)


in_parallel.parallel = True  # pyright: ignore[reportFunctionMemberAccess]


def do_two_lines(episode: Episode, client: openai.OpenAI) -> float:
    """Two lines of two turns each, after a first turn of its own."""

    def line(name: str) -> int:
        said: list[Any] = [user(name)]
        said += [asked(episode, client, said), user(f"{name}, more")]
        return len(asked(episode, client, said).content)

    asked(episode, client, [user("plan")])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return float(sum(pool.map(line, ("a", "b"))))


def do_delegate(episode: Episode, client: openai.OpenAI) -> float:
    """Asks as another agent in between, and goes on with what it knew."""
    said: list[Any] = [user("hello")]
    said.append(asked(episode, client, said))
    aside = asked(episode, client, [user("sum it up")])
    said.append(user(aside.content))
    return float(len(asked(episode, client, said).content))


def asked(episode: Episode, client: openai.OpenAI, said: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model=episode.model, messages=said, **options).choices[0].message


def do_nothing(episode: Episode, client: openai.OpenAI) -> float:
    return 1.0


def do_hang_first(episode: Episode, client: openai.OpenAI) -> None:
    time.sleep(1000)


def do_hang(episode: Episode, client: openai.OpenAI) -> None:
    asked(episode, client, [user("hello")])
    time.sleep(1000)


def do_raise(episode: Episode, client: openai.OpenAI) -> None:
    asked(episode, client, [user("hello")])
    raise ValueError("no")


def do_no_reward(episode: Episode, client: openai.OpenAI) -> None:
    asked(episode, client, [user("hello")])


def do_nan(episode: Episode, client: openai.OpenAI) -> float:
    asked(episode, client, [user("hello")])
    return float("nan")


def do_ask_for_ever(episode: Episode, client: openai.OpenAI) -> None:
    said: list[Any] = [user("hello")]
    while True:
        said += [asked(episode, client, said), user("more")]


def do_rewrite(episode: Episode, client: openai.OpenAI) -> float:
    answer = asked(episode, client, [user("hello")])
    try:
        asked(episode, client, [user("hello!"), answer, user("more")])
    except openai.BadRequestError as error:
        return 1.0 if error.code == "rewritten_history" else 0.0
    return 1.0


def do_rewrite_answer(episode: Episode, client: openai.OpenAI) -> None:
    asked(episode, client, [user("hello")])
    asked(episode, client, [user("hello"), {"role": "assistant", "content": "I was right"}, user("more")])


def do_speak_for_it(episode: Episode, client: openai.OpenAI) -> None:
    answer = asked(episode, client, [user("hello")])
    asked(episode, client, [user("hello"), answer, user("a"), {"role": "assistant", "content": "b"}, user("c")])


def do_drop(episode: Episode, client: openai.OpenAI) -> None:
    asked(episode, client, [user("hello")])
    asked(episode, client, [user("hello")])


def do_other_tools(episode: Episode, client: openai.OpenAI) -> None:
    answer = asked(episode, client, [user("hello")])
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    asked(episode, client, [user("hello"), answer, user("more")], tools=[tool])


def do_two_at_once(episode: Episode, client: openai.OpenAI) -> float:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = [pool.submit(asked, episode, client, [user(text)]) for text in ("a", "b")]
        concurrent.futures.wait(futures)
    return 1.0


def do_refused(episode: Episode, client: openai.OpenAI) -> Outcome:
    """Asks for what is not served, and tells what was refused by its name."""
    refused: dict[str, float] = {}
    asks: dict[str, dict[str, Any]] = {
        "n": {"n": 2},
        "temperature": {"temperature": 0.5},
        "top_p": {"top_p": 0.5},
        "max_tokens": {"max_tokens": 4},
        "max_completion_tokens": {"max_completion_tokens": 4},
        "stop": {"stop": ["x"]},
        "seed": {"seed": 1},
        "top_logprobs": {"logprobs": True, "top_logprobs": 2},
        "logit_bias": {"logit_bias": {"1": 2}},
        "tool_choice": {"tool_choice": "required"},
        "response_format": {"response_format": {"type": "json_object"}},
        "unheard_of": {"extra_body": {"unheard_of": 1}},
    }
    for name, options in asks.items():
        try:
            asked(episode, client, [user("hello")], **options)
        except openai.BadRequestError as error:
            refused[name] = float(error.param == name and error.code == "unsupported")
    asked(episode, client, [user("hello")])
    return Outcome(reward=1.0, metrics=refused)


def do_errors(episode: Episode, client: openai.OpenAI) -> Outcome:
    """Meets the door's other refusals, and tells their status."""
    found: dict[str, float] = {}

    def meet(name: str, key: str, path: str, **options: Any) -> None:
        answer = httpx.post(episode.base_url + path, headers={"authorization": f"Bearer {key}"}, **options)
        assert answer.json()["error"]["code"], name
        found[name] = float(answer.status_code)

    key, chat = episode.api_key, "/chat/completions"
    meet("key", "another", chat, json={})
    meet("path", key, "/completions", json={})
    meet("model", key, chat, json={"model": "gpt-5", "messages": [user("a")]})
    meet("json", key, chat, content=b"{")
    meet("deep", key, chat, content=b"[" * 100_000)
    meet("role", key, chat, json={"model": "policy", "messages": [{"role": "king", "content": "a"}]})
    meet("image", key, chat, json={"model": "policy", "messages": [user([{"type": "image_url"}])]})  # type: ignore[arg-type]
    meet("large", key, chat, content=b"x" * (16 * 2**20 + 1))
    meet("tokens", key, "/../inference/v1/generate", json={"token_ids": [-1]})
    asked(episode, client, [user("hello")])
    return Outcome(reward=1.0, metrics=found)


def do_give_up(episode: Episode, client: openai.OpenAI) -> float:
    """Its client hangs up and asks the same again, as clients do."""
    impatient = client_of(episode, timeout=0.3, max_retries=50)
    impatient.chat.completions.create(model=episode.model, messages=[user("hello")])
    return 1.0


def do_rewrite_tokens(episode: Episode, client: openai.OpenAI) -> None:
    with httpx.Client(headers={"authorization": f"Bearer {episode.api_key}"}) as http:
        url = episode.base_url.removesuffix("/v1") + "/inference/v1/generate"
        for prompt in ([1, 2, 3], [1, 2, 4, 0, 5]):
            http.post(url, json={"token_ids": prompt, "sampling_params": {}}, timeout=None).raise_for_status()


def do_leave_the_cage(episode: Episode, client: openai.OpenAI) -> Outcome:
    """Tries sockets that lead out; the seed is the port of a server outside."""
    failed: dict[str, float] = {}
    ways: dict[str, Any] = {
        "a server on the host's loopback": (socket.AF_INET, ("127.0.0.1", episode.seed)),
        "another network": (socket.AF_INET, ("192.0.2.1", 80)),
        "a socket of the file system": (socket.AF_UNIX, "/run/any.sock"),
        "IPv6": (socket.AF_INET6, ("::1", episode.seed)),
    }
    for name, (family, address) in ways.items():
        try:
            socket.socket(family).connect(address)
        except OSError as error:
            failed[name] = float(error.errno or 0)
    asked(episode, client, [user("hello")])
    return Outcome(reward=1.0, metrics=failed)
