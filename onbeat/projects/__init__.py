"""`onbeat init`: a folder with a job of one's own that runs."""
