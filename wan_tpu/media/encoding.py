"""Settings of the encoders of frames and sound. Files with the same settings can be joined without encoding again."""

import re
from fractions import Fraction

# Pixels become BT.709 with a limited range at every size, and the file says so. If a file says nothing, players guess
# by the number of lines, and most of them guess BT.709 from 720 lines on, and BT.601 below.
COLOURS = (
    "scale=out_color_matrix=bt709:out_range=tv,format=yuv420p,"
    "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
)
# Pixels become square, which `COLOURS` and every reader of raw frames assume.
SQUARE = "scale=round(iw*sar):ih,setsar=1"
# Videos of phones are often HDR. These filters make them look right on an ordinary display: brightness up to that of
# paper hardly changes, and anything brighter is compressed.
TO_SDR = (
    "zscale=t=linear:npl=203,format=gbrpf32le,tonemap=mobius:desat=0,zscale=p=bt709:t=bt709:m=bt709:r=tv,format=yuv444p"
)
# As close to the frames as x264's default preset with its "visually lossless" crf of 18: 48 dB for a clean clip (50
# there) and 44 dB for a noisy one (as there), in files of about the same size, for a quarter of the processor time. It
# looks two frames ahead, not forty, its threads share each frame, and motion is searched in whole blocks of 16 pixels,
# so the file is finished 0.1 s after its last frame, on two cores.
H264 = (
    "-c:v libx264 -preset veryfast -crf 17 -x264-params "
    "subme=1:bframes=1:rc-lookahead=2:sync-lookahead=0:sliced-threads=1:threads=8:partitions=i8x8,i4x4"
)
# Half as much again as ffmpeg's default of 128 kbit/s, but still little compared with the frames.
AAC = "-c:a aac -b:a 192k"
# PQ and HLG, whose curves ffmpeg prints after matrix and primaries; without those they can't be converted.
_HDR = re.compile(rb"Video: .{0,300}?\b(?:bt2020nc|bt709)/(?:bt2020|smpte432|bt709)/(?:smpte2084|arib-std-b67)\b")


def exact_rate(fps: float) -> Fraction:
    """Return the rate of a file that is to have `fps` frames per second: six digits, which ffmpeg takes exactly."""
    return Fraction(f"{fps:g}")


def is_hdr(described: bytes) -> bool:
    """Return whether a video is HDR, from ffmpeg's description of its streams."""
    return _HDR.search(described) is not None
