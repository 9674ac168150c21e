"""A job's model as its folder has it: its files, judged before a process loads them, and its text, which is trained."""
