"""Rules that say which generators may sample a job; a stack asks them of live ones, a profile of those to start."""

from __future__ import annotations

from collections.abc import Collection

from contracts.engines import ENGINES
from contracts.errors import InvalidInput
from contracts.spec.job import JobSpec


def check_engines(
    spec: JobSpec, *, not_reproducible: Collection[str], silent: Collection[str], no_routes: Collection[str] = ()
) -> None:
    """Raises InvalidInput where there are generators, but none of them would serve the job (I7), or one of them cannot.

    not_reproducible: of each generator the name of its engine where batches that run beside each other change last bits
    there, "" elsewhere. silent: the same, where the engine says what truncated sampling keeps by a top_k alone.
    no_routes: the same, where it doesn't say which experts a token went through.
    """
    if spec.deterministic and not_reproducible and "" not in not_reproducible:
        raise InvalidInput(
            f"generators sample with {', '.join(sorted(set(not_reproducible)))}: last bits depend on what else runs",
            field="deterministic",
            cure="set deterministic = false, or add a generator with transformers, or with vllm and batch_invariant",
        )
    if (truncation := spec.rollout.sampling.unbounded_truncation) and silent and "" not in silent:
        raise InvalidInput(
            f"generators sample with {', '.join(sorted(set(silent)))}, which doesn't report which tokens {truncation} "
            "keeps without a top_k: log-probs couldn't be compared",
            field=f"rollout.sampling.{truncation.split()[0]}",
            cure="set top_k, too, or add a generator with transformers",
        )
    if spec.algorithm.replays_routes and no_routes and "" not in no_routes:
        raise InvalidInput(
            f"generators sample with {', '.join(sorted(set(no_routes)))}, and routing_replay needs the transformers "
            "engine, which reports the experts of each token",
            field="algorithm.routing_replay",
            cure="leave it out, or add a generator with transformers",
        )
    of_files = [name for name in not_reproducible if name in ENGINES and not ENGINES[name].reads_elsewhere]
    if spec.weights.elsewhere and of_files and not spec.deterministic:
        raise InvalidInput(
            f"the server of a generator with {of_files[0]} reads files, not {spec.weights.elsewhere}",
            field="weights.transport",
            cure='set it to "file" or "delta"',
        )
