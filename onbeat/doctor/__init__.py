"""Says what of this machine would hurt a job, before one does: a line each, with the cure; nothing is changed."""
