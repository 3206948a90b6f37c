#!/usr/bin/env bash
# ffmpeg's list of files to join (the concat demuxer) keeps each file's `duration` in whole microseconds.
#
# Guess: a video joined from equal parts by copying, each with its exact duration in the list, has evenly spaced frames.
# Seen (imageio-ffmpeg 0.8.1, ffmpeg 9.0.2): where a part's duration is no whole number of microseconds, such as that of 81 frames at
# 16.1234 frames a second, the errors of the parts add up. With few parts the frames still round to the right tick of
# the file; with 30, one frame is a tick early. At 16 frames a second nothing is rounded, and all frames are even.
#
# Whoever decides by even frames whether a video can be joined once more by copying encodes it again instead, after
# enough parts at such a rate. The list can't state a fraction.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet imageio-ffmpeg==0.8.1
cd "$folder"
cat > join.py <<'END'
import collections
import fractions
import re
import subprocess

import imageio_ffmpeg

ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
print(subprocess.run([ffmpeg, "-version"], capture_output=True, text=True).stdout.split()[2])


def list_steps(rate, parts, frames=81):
    """Join equal parts by copying; return how often each distance between two frames occurs, in ticks of the file."""
    source = ["-f", "lavfi", "-i", f"testsrc2=size=64x64:rate={rate}", "-frames:v", str(frames)]
    subprocess.run([ffmpeg, "-v", "error", "-y", *source, "-c:v", "libx264", "part.mp4"], check=True)
    lasts = float(frames / fractions.Fraction(rate))
    with open("parts", "w") as file:
        file.write("ffconcat version 1.0\n" + f"file part.mp4\nduration {lasts:.12f}\n" * parts)
    join = ["-f", "concat", "-i", "parts", "-map", "0:v", "-c", "copy", "-f", "framehash", "-"]
    text = subprocess.run([ffmpeg, "-v", "error", *join], check=True, capture_output=True, text=True).stdout
    times = sorted(int(line.split(",")[2]) for line in text.splitlines() if re.match(r"\d", line))
    return dict(collections.Counter(b - a for a, b in zip(times, times[1:])))


for rate in ("16", "16.1234"):
    for parts in (2, 30):
        print(rate, parts, list_steps(rate, parts))
END
"$folder/venv/bin/python" join.py | tee seen
diff seen - <<'END'
n9.0.2-17-g2a571b6068-20260930
16 2 {1024: 161}
16 30 {1024: 2429}
16.1234 2 {5000: 161}
16.1234 30 {5000: 2428, 4999: 1}
END
