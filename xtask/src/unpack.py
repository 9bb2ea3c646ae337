"""Unpacks parts of a wheel: WHEEL FOLDER PATTERN...

A member is kept when a PATTERN matches it and no `!PATTERN` does (`*` also matches `/`). Prints how many were kept.
"""

import fnmatch
import sys
import zipfile

wheel, folder, patterns = sys.argv[1], sys.argv[2], sys.argv[3:]
keep = [p for p in patterns if not p.startswith("!")]
drop = [p[1:] for p in patterns if p.startswith("!")]
with zipfile.ZipFile(wheel) as archive:
    members = [
        m
        for m in archive.namelist()
        if any(fnmatch.fnmatchcase(m, p) for p in keep) and not any(fnmatch.fnmatchcase(m, p) for p in drop)
    ]
    archive.extractall(folder, members)
print(len(members))
