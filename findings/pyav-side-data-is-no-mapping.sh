#!/usr/bin/env bash
# The side data of PyAV's frames is a Mapping, but it iterates over its values.
#
# Guess: `frame.side_data` behaves as any `collections.abc.Mapping`: `keys()` gives what `[]` takes, and `values()`,
# `items()` and `dict()` work.
# Seen (av 18.1.0): `iter()` and `keys()` yield the SideData objects themselves. `values()`, `items()` and `dict()` look
# each of them up as a key, and raise KeyError. Only `in`, `get` and `[]` with a name or a type do what they say.
#
# Whoever lists a frame's side data, such as to find out whether it is turned, must ask for each kind by its name, or
# read the iterator's objects as values.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet av==18.1.0 numpy
cd "$folder"
cat > read.py <<'END'
import collections.abc
import io

import av
import numpy as np

file = io.BytesIO()
with av.open(file, "w", format="mp4") as video:
    stream = video.add_stream("libx264", rate=8, width=64, height=64)
    for _ in range(2):
        video.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))))
    video.mux(stream.encode())
file.seek(0)
with av.open(file) as video:
    data = next(video.decode(video=0)).side_data  # The encoder's settings.
print(isinstance(data, collections.abc.Mapping), len(data))
print([type(key).__name__ for key in data.keys()])
for name, read in {"values": lambda: list(data.values()), "items": lambda: list(data.items()), "dict": lambda: dict(data)}.items():
    try:
        print(name, read())
    except Exception as error:
        print(name, type(error).__name__)
print("SEI_UNREGISTERED" in data, data.get("DISPLAYMATRIX"))
END
"$folder/venv/bin/python" read.py | tee seen
diff seen - <<'END'
True 1
['SideData']
values KeyError
items KeyError
dict KeyError
True None
END
