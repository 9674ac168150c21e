"""One prompt batch on its way to a published rollout batch."""
