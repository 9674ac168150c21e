"""The kinds of data sets, a small file each, found by its `type` in the group `onbeat.dataset_types`. Beside them: how
their prompts are drawn, of the group `onbeat.draws`, and the completions that they give."""
