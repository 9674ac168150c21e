"""Takes a job's lease, trains it, and says how it ended.

    what ended it                       the job          saved    exit code
    the last iteration is committed     succeeded                 DONE
    evaluation.stop_when                succeeded        yes      DONE
    Cancelled                           cancelled        yes      DONE
    Stopped, by SIGTERM or SIGINT       stays running    yes      DONE; STOPPED where Redis is away
    BatchFailed, DeadlineExceeded,
    Unhealthy                           failed           yes      FAILED
    another OnbeatError, such as the
    InvalidInput of a dry pass          failed                    FAILED
    Unavailable, FenceViolation         stays running             DIED; HELD where it is another's by then
    an error that is none of ours       stays running             DIED
    the same one as of the trainer
    before (repeated_fault.py)          failed                    FAILED
    FencedOff                           is another's              HELD

Saved is the last committed version, as a checkpoint. A job that was being cancelled is cancelled by an error, too. At
each end but HELD the lease is given back, so that a successor starts at once; where Redis is away, it runs out. From
its SIGTERM on the process has TRAINER_END_S for all of that, whatever it waits for (onbeat/base/process/ending.py).
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NoReturn

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from consumer.model.memory import OutOfMemory, cure_of, has_words_of_memory, memory_named
from consumer.ranks.launching import is_rank, sealed
from consumer.trainer import repeated_fault
from consumer.trainer.commit import save
from consumer.trainer.held_job import HeldJob
from consumer.trainer.trainer import run_iterations
from contracts import errors
from contracts.jobs import JobState, TrainerExit
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base.metrics.process_metrics import ProcessMetrics, metrics_of
from onbeat.base.process.ending import CALL_S, TRAINER_END_S, Ending
from onbeat.loop.lease_keeper import LAST_WORDS_S, Cancelled, LeaseKeeper, Stopped
from onbeat.loop.trained_job import trainer_side

log = logging.getLogger(__name__)


def train(settings: StackSettings, broker: Broker, spec: JobSpec, job_id: str) -> TrainerExit:
    """Trains in the only process of a trainer, or in its rank 0. Raises OnbeatError before the lease is held."""
    side = trainer_side(broker, job_id, spec, owner=settings.process_id())
    group = sealed(settings, spec) if is_rank() else 0
    try:
        epoch = side.acquire(group)
    except errors.Conflict as error:
        log.info("job %s: %s", job_id, error)
        return TrainerExit.HELD
    log.info("this trainer holds job %s by its lease %d", job_id, epoch)
    jobs = JobStore(broker)
    keeper = LeaseKeeper(
        side,
        lease_s=spec.timeouts.trainer_lease_s,
        end_loading=lambda why: _end_loading(why, jobs, side=side, job_id=job_id),
        end_stuck=lambda silent_s: _end_stuck(silent_s, JobStore(broker), side=side, job_id=job_id),
        # Beside its own work it waits for Redis, services and stores there.
        patience_s=spec.timeouts.iteration_s + spec.timeouts.dependency_s,
        end_hung=lambda silent_s: _end_hung(silent_s, side),
    )
    keeper.start()
    with _stopped_by_signals(keeper, broker), contextlib.closing(keeper):
        load = partial(
            HeldJob, settings, broker, spec, side=side, keeper=keeper, job_id=job_id, metrics=_metrics_of(settings)
        )
        try:
            code = _train_held(jobs, job_id, side=side, spec=spec, load=load)
            # At an end that is the trainer's own; one that was fenced off or cut off has no lease to give back.
            return _give_back(side, keeper, code)
        except errors.FencedOff as error:
            log.error("%s", error)
            return TrainerExit.HELD
        except (errors.Unavailable, errors.FenceViolation) as error:
            # A rank's foreign error comes as one of ours, with its words.
            words = str(error)
            if has_words_of_memory(error.foreign):
                words = f"out of memory: {words} ({cure_of(spec, loads=False)})"
            if error.foreign and repeated_fault.ends_job(jobs, job_id, words, trainer_epoch=epoch):
                return _give_back(side, keeper, TrainerExit.FAILED)
            return _left_to_another(error, side, keeper)
        except BaseException as error:
            # SystemExit of a library, too: its code would say that the trainer was done.
            line = str(error) if isinstance(error, OutOfMemory) else repeated_fault.line_of(error)
            log.critical("this trainer ends by an error that no code of Onbeat raised: %s", line, exc_info=error)
            code = TrainerExit.DIED
            # A rank whose peer was killed meets a RuntimeError of torch: that says nothing of the job.
            is_of_a_peer = is_rank() and type(error) is RuntimeError
            if not is_of_a_peer and repeated_fault.ends_job(jobs, job_id, line, trainer_epoch=epoch):
                code = TrainerExit.FAILED
            code = _give_back(side, keeper, code)
            if code is TrainerExit.DIED and isinstance(error, Exception):
                raise
            return code


def _metrics_of(settings: StackSettings) -> ProcessMetrics:
    """Creates the trainer's metrics, and serves them where they can be.

    A port that is taken, as by a trainer that has not quite ended, is no reason not to train: a warning says so.
    """
    try:
        return metrics_of(settings, "trainer")
    except errors.InvalidInput as error:
        log.warning("this trainer serves no metrics: %s", error)
        return ProcessMetrics("trainer")


def _train_held(
    jobs: JobStore, job_id: str, *, side: TrainerSide, spec: JobSpec, load: Callable[[], HeldJob]
) -> TrainerExit:
    """Trains a job whose lease is held, and writes how it ended, as the table at the head of this file says."""
    state = jobs.state(job_id)
    if state.is_final:
        return TrainerExit.DONE
    job: HeldJob | None = None
    try:
        if state is JobState.CANCELLING:
            raise Cancelled
        _begin(jobs, job_id, side)
        with memory_named(spec, loads=True):
            job = load()
        with memory_named(spec, loads=False):
            stopped = run_iterations(job)
    except Cancelled:
        reason = ""
        if job is not None:
            reason = _saved(job)
        jobs.move(job_id, JobState.CANCELLED, reason=reason, trainer_epoch=side.trainer_epoch)
        _clear(job)
    except Stopped:
        if job is not None:
            _saved(job)
        log.info("stopped; another trainer may go on with job %s", job_id)
    except (errors.FencedOff, errors.FenceViolation, errors.Unavailable):
        raise
    except errors.OnbeatError as error:
        log.error("job %s failed: %s", job_id, error)
        # The lease comes before the files: a trainer that slept past it writes no checkpoint beside its successor's.
        side.renew()
        if job is not None and isinstance(error, (errors.BatchFailed, errors.DeadlineExceeded, errors.Unhealthy)):
            _saved(job)
        jobs.fail(job_id, str(error), fault=error.fault, trainer_epoch=side.trainer_epoch)
        _clear(job)
        return TrainerExit.FAILED
    else:
        jobs.move(job_id, JobState.SUCCEEDED, reason=stopped, trainer_epoch=side.trainer_epoch)
        log.info("job %s succeeded%s", job_id, f": {stopped}" if stopped else "")
        _clear(job)
    finally:
        if job is not None:
            job.ranks.close()
    return TrainerExit.DONE


def _left_to_another(error: Exception, side: TrainerSide, keeper: LeaseKeeper) -> TrainerExit:
    """Ends this trainer by an error that is not the job's."""
    if _reaches_redis(error):
        log.error("this trainer ends, the job goes on in another: %s", error)
        return _give_back(side, keeper, TrainerExit.DIED)
    if keeper.is_stop_requested:
        log.warning("this trainer ends without giving its lease back, because Redis can't be reached: %s", error)
        return TrainerExit.STOPPED
    log.error("this trainer ends, the job goes on in another: %s", error)
    return TrainerExit.DIED


def _give_back(side: TrainerSide, keeper: LeaseKeeper, ended: TrainerExit) -> TrainerExit:
    """Lets a successor start at once: the ranks have ended, and this one commits and names no file any more (I4).

    Where Redis is away the lease runs out. A trainer that slept past its lease may meet its successor's work before the
    keeper has looked: then the job is HELD.

    Returns:
        The exit code: `ended`, or HELD.
    """
    # A renewal after it would take the lease again.
    keeper.close()

    def tell() -> None:
        nonlocal ended
        try:
            side.release()
        except errors.FencedOff as why:
            log.error("%s", why)
            ended = TrainerExit.HELD
        except errors.OnbeatError as why:
            log.info("this trainer can't give its lease back, which runs out by itself: %s", why)

    _say_last(tell)
    return ended


def _reaches_redis(error: Exception) -> bool:
    """Returns True where a trainer that ends with this error can say so: a call of a server that is away would wait."""
    return not isinstance(error, errors.BrokerUnavailable)


def _begin(jobs: JobStore, job_id: str, side: TrainerSide) -> None:
    """Raises Cancelled where the job was asked to end meanwhile."""
    try:
        jobs.move(job_id, JobState.RUNNING, trainer_epoch=side.trainer_epoch)
    except errors.Conflict as error:
        log.info("%s", error)
        raise Cancelled from error


def _clear(job: HeldJob | None) -> None:
    """Removes the versions of a job that has ended; a resume writes its first one again."""
    if job is not None:
        job.weights.store.remove_all()


def _saved(job: HeldJob) -> str:
    """Saves the last committed version; returns "", or the reason why it isn't saved, which must not change the end."""
    try:
        save(job)
    except (errors.FencedOff, errors.BrokerUnavailable):
        raise
    except errors.OnbeatError as error:
        log.error("no checkpoint of the last committed iteration: %s", error)
        return f"its last checkpoint could not be written: {error}"
    return ""


@contextlib.contextmanager
def _stopped_by_signals(keeper: LeaseKeeper, broker: Broker) -> Iterator[None]:
    """Asks the keeper to stop at SIGTERM and SIGINT, and has no call of Redis outlast the trainer's end."""

    def end() -> None:
        keeper.request_stop()
        # A server that is away must not cost the time that a checkpoint needs.
        broker.hurry(CALL_S)

    ending = Ending(TRAINER_END_S, exit_code=TrainerExit.STOPPED, on_request=end)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: keeper.request_stop())
    with ending.listening():
        yield


def _end_loading(why: Exception, jobs: JobStore, *, side: TrainerSide, job_id: str) -> None:
    """Ends the process in the keeper's thread while the main one loads: nothing is to be saved."""
    # Cancelled and Stopped have no text.
    log.info("ends while it loads: %s", str(why) or type(why).__name__.lower())

    def tell() -> None:
        if isinstance(why, Cancelled):
            jobs.move(job_id, JobState.CANCELLED, trainer_epoch=side.trainer_epoch)
        if isinstance(why, (Cancelled, Stopped, errors.Unavailable)) and _reaches_redis(why):
            side.release()

    _say_last(tell)
    code = TrainerExit.STOPPED
    if isinstance(why, errors.FencedOff):
        code = TrainerExit.HELD
    elif isinstance(why, errors.Unavailable):
        code = TrainerExit.DIED
    _exit(code)


def _end_stuck(silent_s: float, jobs: JobStore, *, side: TrainerSide, job_id: str) -> None:
    """Fails the job in the keeper's thread: the main one is in a pass that nothing can end but the process."""
    late = errors.DeadlineExceeded(
        f"training of one rollout batch has taken {silent_s:.0f} s and hasn't ended", cure="raise timeouts.iteration_s"
    )
    log.error("job %s failed: %s", job_id, late)

    def tell() -> None:
        jobs.fail(job_id, str(late), fault=late.fault, trainer_epoch=side.trainer_epoch)
        side.release()

    _say_last(tell)
    _exit(TrainerExit.FAILED)


def _end_hung(silent_s: float, side: TrainerSide) -> None:
    """Ends the process in the keeper's thread: the main thread hangs by a fault of the process, and not of the job."""
    log.error("no progress for %.0f s (timeouts.iteration_s): this trainer stops, and another continues", silent_s)
    with contextlib.suppress(OSError, ValueError):  # no file stands behind stderr
        faulthandler.dump_traceback()
    _say_last(side.release)
    _exit(TrainerExit.DIED)


def _say_last(tell: Callable[[], None]) -> None:
    """Calls a function in a thread, for LAST_WORDS_S at the most: a Redis that is away doesn't hold the end up.

    The lease runs out then, and a worker finds the job.
    """
    telling = threading.Thread(target=tell, name="last words", daemon=True)
    telling.start()
    telling.join(LAST_WORDS_S)


def _exit(code: TrainerExit) -> NoReturn:
    logging.shutdown()
    os._exit(code)
