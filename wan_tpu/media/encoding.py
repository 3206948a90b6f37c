"""Settings of the encoders of frames and sound. Files with the same settings can be joined without encoding again."""

from fractions import Fraction

# ffmpeg's default conversion rounds down, which darkens a video by a level each time it is read and written.
EXACT = "accurate_rnd+full_chroma_int+full_chroma_inp"
# Pixels become BT.709 with a limited range at every size, and the file says so. If a file says nothing, players guess
# by the number of lines, and most of them guess BT.709 from 720 lines on, and BT.601 below.
BT709 = "out_color_matrix=bt709:out_range=tv"
TAGS = "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
COLOURS = f"scale={BT709}:flags=bicubic+{EXACT},format=yuv420p,{TAGS}"
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
# Each packet has the samples of two, its own and those of the packet before, and the first one has silence before it.
# Sound that goes on from another file's is encoded from so many packets earlier on, which are left out: then the error
# at a join, in decibels of full scale, is that of any other place, -51. With one packet it is -28, without any -12.
LEAD = 4
WITHOUT_LEAD = f"noise=drop=not(trunc(n/{LEAD})),setts=ts=TS-{1024 * LEAD}"


def exact_rate(fps: float) -> Fraction:
    """Return the rate of a file that is to have `fps` frames per second: six digits, which ffmpeg takes exactly."""
    return Fraction(f"{fps:g}")
