"""The files that a table of a spec names, by content: what a job was accepted with, and what each of its processes
reads.

    spec of a client ─ gateway reads the files ─▶ file_digests in its tables ─▶ the job's record, `AuditRecord.files`
                                                        └─▶ each process that reads a file compares, and keys its caches

A process whose file has other bytes refuses it by name (onbeat/data/named_files.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from contracts.encoding.digests import Digest, content_digest
from contracts.encoding.wire import NO_CONTROL_CHARACTERS, encode

MOST_FILES = 4096
"""In one table: the largest models have some hundred files of weights."""
MOST_PATH_CHARACTERS = 2048
"""A path that a spec may have, and the name of a file in the folder that it leads to."""
NamedPath = Annotated[str, Meta(min_length=1, max_length=MOST_PATH_CHARACTERS, pattern=NO_CONTROL_CHARACTERS)]
FileDigests = Annotated[dict[NamedPath, Digest], Meta(max_length=MOST_FILES)]
"""Path of a file, as the spec writes it, → digest of its bytes. The path of a file in a folder is the folder's and its
name: "models/base/config.json"."""


def digest_of_files(digests: Mapping[str, Digest]) -> str:
    """Returns one digest over all of them, in the order of their paths; "" of none."""
    if not digests:
        return ""
    return content_digest(encode(sorted(digests.items())))
