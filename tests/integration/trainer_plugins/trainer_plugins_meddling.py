"""A module that changes torch when it is imported."""

import trainer_plugins

trainer_plugins.meddle()
LOSS = trainer_plugins.AS_GRPO
