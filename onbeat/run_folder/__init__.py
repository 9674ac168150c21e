"""The files of a run, in a folder that hosts share or as copies in an object store."""
