"""What a reading process may use."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReaderLimits:
    """The descriptors that a reading process gets, and the limits that it runs under.

    Attributes:
        file: Descriptor of the file that is read.
        scratch: Descriptor of another one in memory, of the largest size that a video may have.
        memory: Bytes of memory. The ffmpeg that the process starts for a video gets as many.
        cpu_s: Processor time; ffmpeg gets `video_cpu_s`.
        video_pixels: The most pixels of a video's frame.
        video_s: How long a video that is continued may last.
    """

    file: int
    scratch: int
    memory: int
    cpu_s: int
    video_cpu_s: int
    video_pixels: int
    video_s: float
