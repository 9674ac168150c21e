"""On-policy distillation: the reverse KL to a teacher at each token that the student sampled.

    l = rho sg(log pi(o_t) - log pi_teacher(o_t)),  rho = pi(o_t) / pi_old(o_t)

Lu and Thinking Machines Lab 2025, "On-Policy Distillation": the student samples, the teacher judges every token, and
no token is charged with what the ones after it cost (a discount of 0). In the first update pi is pi_old and this is
their advantage, log pi_teacher - log pi_old, as a policy gradient. Its mean over pi_old's samples has the gradient of
KL(pi || pi_teacher) at each prefix, also where pi has left pi_old: the score is that of pi as it is now, not of pi_old.
So it is 0 where the student gives a token the teacher's probability, a step can't be pulled past it, and no clip is
needed; the advantage of PPO, which is fixed while pi moves, needs one.
"""

from __future__ import annotations

from torch import Tensor


def reverse_kl(log_ratio: Tensor, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Computes the token losses, [R, T] each, with the gradient of log_ratio = log rho (`LossInputs.log_ratio`)."""
    return log_ratio.exp() * (logprobs.detach() - teacher_logprobs)
