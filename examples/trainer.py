"""Trains a job with `trainer.external = true` in plain PyTorch: REINFORCE, each group's mean reward as its baseline.

    python examples/trainer.py JOB

Kill it at any time and start it again: it goes on where its last commit was.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from onbeat.client import Consumer, TrainingRows


def loss_of(model: PreTrainedModel, rows: TrainingRows) -> Tensor:
    """Sums -advantage * log-probability of the sampled tokens over the rows."""
    rewards = torch.from_numpy(rows.rewards).float().reshape(-1, rows.group_size)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)).reshape(-1)
    texts = list(zip(rows["prompt_ids"], rows["completion_ids"], rows["sampled"], strict=True))
    tokens = torch.zeros(len(texts), max(len(prompt) + len(answer) for prompt, answer, _ in texts), dtype=torch.long)
    targets = torch.full_like(tokens, -100)
    for row, (prompt, answer, sampled) in enumerate(texts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
        tokens[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        targets[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer).where(
            torch.tensor(sampled) > 0, -100
        )
    logits = model(input_ids=tokens).logits[:, :-1].transpose(1, 2)
    surprisal = cross_entropy(logits, targets[:, 1:], ignore_index=-100, reduction="none").sum(dim=1)
    return (advantages * surprisal).sum()


def main(job_id: str, learning_rate: float = 0.002) -> None:
    with Consumer(job_id) as consumer:
        model = AutoModelForCausalLM.from_pretrained(consumer.state or consumer.model_folder, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        if consumer.state:
            optimizer.load_state_dict(torch.load(consumer.state / "optimizer.pt"))

        def save(folder: Path) -> None:
            model.save_pretrained(folder)
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")

        consumer.begin(model)
        for iteration in consumer:
            losses = []
            for rows in iteration:
                losses.append(loss_of(model, rows))
                losses[-1].backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
            consumer.commit(loss=float(sum(losses)), grad_norm=norm, learning_rate=learning_rate, save=save)


main(sys.argv[1])
