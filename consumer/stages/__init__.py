"""Stage workers of our own: they make the columns of `reference`, `teacher`, `reward_model` and `llm_judge`."""
