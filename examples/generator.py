"""Samples a job with transformers' own `generate`, and publishes what it sampled: python examples/generator.py JOB"""

import sys

import torch
from transformers import AutoTokenizer, PreTrainedModel

from onbeat.client import Producer, PromptClaim, Sample


def samples_of(model: PreTrainedModel, claim: PromptClaim, prompt: int) -> list[Sample]:
    """Draws the G completions of one prompt, with the log-probs of their tokens; temperature 0 is greedy."""
    ids, temperature = torch.tensor([claim.prompt_ids(prompt)] * claim.group_size), claim.sampling.temperature
    torch.manual_seed(claim.seed(prompt))
    answer = model.generate(  # pyright: ignore[reportCallIssue]  # a mixin of each causal LM
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=claim.sampling.max_new_tokens,
        eos_token_id=(end := words.eos_token_id),
        pad_token_id=end,
        return_dict_in_generate=True,
        output_logits=True,
        **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}),
    )
    logprobs = torch.stack(answer.logits, dim=1).div(temperature or 1.0).log_softmax(dim=-1)
    samples = []
    for row, tokens in zip(logprobs, answer.sequences[:, ids.shape[1] :].tolist(), strict=True):
        tokens = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        drawn, text = [row[at, token].item() for at, token in enumerate(tokens)], words.decode(tokens, True)
        reason = "stop" if tokens[-1] == end else "length"
        samples.append(Sample(token_ids=tokens, logprobs=drawn, text=text, finish_reason=reason))
    return samples


with Producer(sys.argv[1]) as producer:
    network, words = producer.make_model(), AutoTokenizer.from_pretrained(producer.model_folder)
    producer.proves(network)
    for claim in producer:
        digest = producer.load(claim, network)
        made = [samples_of(network, claim, prompt) for prompt in range(len(claim.prompts))]
        producer.publish(claim, made, producer.score(claim, made), weights_digest=digest)
