"""The interpreter of one trajectory: blocks come in through a socket, and what they print and draw
goes out.

It runs in a child of server.py. Nothing that it sends is trusted: the program can change all of it.
"""

import base64
import contextlib
import hashlib
import io
import json
import random
import socket
import traceback
import uuid

MAX_TEXT = 3900  # characters that a block may print: the middle of a longer text is cut
MAX_ERROR = 1000  # characters of an exception
MAX_FIGURES = 8  # of a block
MAX_PIXELS = 4_000_000  # of a figure
MAX_RATIO = 200  # of a figure's sides, which must stay below: image processors refuse more
MAX_BYTES = 2**25  # of a block's figures together, as PNG


class Session:
    """The state of a trajectory: its variables, its pictures, the figures of a block."""

    def __init__(self, connection: socket.socket):
        import matplotlib.figure
        import matplotlib.pyplot as plt
        import numpy as np
        from PIL import Image, ImageOps

        self.connection = connection
        self.plt = plt
        self.Image = Image
        self.ImageOps = ImageOps
        self.namespace = {
            "__name__": "__main__",
            "plt": plt,
            "np": np,
            "Image": Image,
            "io": io,
            "base64": base64,
        }
        self.drawn: list[bytes] = []  # figures of the last block, as PNG
        self.num_pictures = 0  # that the policy has seen
        self.num_blocks = 0
        self.entropy: Entropy | None = None  # from the first block on

        def show_all(*_, **__) -> None:
            self.show([plt.figure(number) for number in plt.get_fignums()])

        def show_one(figure, *_, **__) -> None:
            self.show([figure])

        plt.show = show_all
        matplotlib.figure.Figure.show = show_one

    def run(self) -> None:
        """Run the blocks that come through the socket, until its end."""
        while job := self.receive():
            if self.entropy is None:
                self.entropy = Entropy(job["seed"])
            self.number_figures(job["num_figures"])
            for picture in job["pictures"]:
                self.bind(picture)
            self.send(b"begun")
            text, error = self.block(job["code"])
            sizes = [len(png) for png in self.drawn]
            reply = {"text": text, "error": error, "figures": sizes}
            head = json.dumps(reply, ensure_ascii=False).encode(errors="replace")
            self.send(head + b"\n" + b"".join(self.drawn))

    def block(self, code: str) -> tuple[str, str]:
        """Run a block. Returns (what it printed, the exception that ended it or "")."""
        self.drawn = []
        self.num_blocks += 1
        if self.entropy:  # None without `run`: papers/pyvision calls `block` by itself
            self.entropy.begin(self.num_blocks)
        name = f"<block {self.num_blocks}>"
        output = Output()
        error = ""
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            try:
                exec(compile(code, name, "exec"), self.namespace)
            except BaseException as raised:
                error = describe(raised, name)
        return output.text(), error

    def show(self, figures: list) -> None:
        """Draw figures for the policy, at their own resolution, and close them."""
        try:
            for figure in figures:
                if len(self.drawn) >= MAX_FIGURES:
                    raise ValueError(f"a block shows at most {MAX_FIGURES} figures")
                png = self.png_of(figure)
                if sum(map(len, self.drawn)) + len(png) > MAX_BYTES:
                    raise ValueError(f"the figures of a block have at most {MAX_BYTES >> 20} MB")
                self.drawn.append(png)
        finally:  # those that are refused, too: left open, they would come with the next plt.show()
            for figure in figures:
                self.plt.close(figure)

    def png_of(self, figure) -> bytes:
        """ValueError for a figure that is too large."""
        size = [round(inches * figure.dpi) for inches in figure.get_size_inches()]
        check_size(*size)  # before it takes memory
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi="figure")
        check_size(*self.Image.open(buffer).size)  # a margin may have been added
        return buffer.getvalue()

    def number_figures(self, count: int) -> None:
        """Bind the first `count` figures of the last block, which the policy was shown, to
        image_clue_k."""
        for png in self.drawn[:count]:
            self.namespace[f"image_clue_{self.num_pictures}"] = self.picture(png)
            self.num_pictures += 1

    def bind(self, picture: dict) -> None:
        """Bind a picture, or a video (its frames, or its file), to its name."""
        frames = [base64.b64decode(frame) for frame in picture["frames"]]
        if picture["kind"] == "file":
            value = VideoFile(frames[0])
        else:
            pictures = [self.picture(frame) for frame in frames]
            if picture["kind"] == "image":
                value = pictures[0]
            else:
                value = Frames(pictures, picture.get("fps") or 1.0)
        self.namespace[picture["name"]] = value
        # 0 for a picture of the row that the prompt does not show, else 1
        self.num_pictures += picture["seen"]

    def picture(self, encoded: bytes):
        """A picture as the policy sees it: upright, in RGB, without transparency (as `to_rgb` of
        common.pictures)."""
        image = self.ImageOps.exif_transpose(self.Image.open(io.BytesIO(encoded)))
        if image.mode.startswith("I;16"):
            image = image.convert("I").point(lambda value: value / 256).convert("L")
        elif image.has_transparency_data:
            image = image.convert("RGBA")
            image = self.Image.alpha_composite(self.Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")

    def receive(self) -> dict | None:
        """The next job; None at the end of the socket."""
        head = self.read(8)
        if not head:
            return None
        return json.loads(self.read(int.from_bytes(head, "big")))

    def read(self, size: int) -> bytes:
        """That many bytes; b"" at the end of the socket."""
        # Without a buffer, whose memory would depend on the pieces in which they come: a program
        # that runs again prints the same addresses, and has its sets in the same order.
        data = self.connection.recv(size, socket.MSG_WAITALL)
        while data and len(data) < size:
            piece = self.connection.recv(size - len(data), socket.MSG_WAITALL)
            if not piece:
                return b""
            data += piece
        return data

    def send(self, message: bytes) -> None:
        self.connection.sendall(len(message).to_bytes(8, "big") + message)


class Entropy:
    """Replaces the system's entropy, so that a block that runs again draws the same random numbers.

    What is drawn without a seed follows from the trajectory, the block, and the number of draws
    before. os.urandom itself, and what reads it directly, stays random.
    """

    def __init__(self, seed: str):
        import numpy as np

        self.seed = seed
        self.block = 0
        self.num_draws = 0
        seed_with = random.Random.seed

        def seed_generator(generator, a=None, version=2):
            if a is None:
                a = self.draw(32)
            seed_with(generator, a, version)

        def draw_bits(bits: int) -> int:
            return int.from_bytes(self.draw(bits // 8), "big")

        def draw_uuid() -> uuid.UUID:
            return uuid.UUID(bytes=self.draw(16), version=4)

        random.Random.seed = seed_generator
        random.seed = random._inst.seed  # _inst: the generator behind the module's functions
        np.random.bit_generator.randbits = draw_bits
        uuid.uuid4 = draw_uuid
        random.seed()
        np.random.seed()

    def begin(self, block: int) -> None:
        self.block = block
        self.num_draws = 0

    def draw(self, size: int) -> bytes:
        self.num_draws += 1
        place = f"{self.seed}/{self.block}/{self.num_draws}"
        return hashlib.shake_128(place.encode()).digest(size)


class Output(io.TextIOBase):
    """Keeps the first and the last characters of what is printed."""

    def __init__(self) -> None:
        self.head = ""
        self.tail = ""
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.size += len(text)
        room = MAX_TEXT // 2 - len(self.head)
        self.head += text[:room]
        self.tail = (self.tail + text[room:])[-(MAX_TEXT // 2) :]
        return len(text)

    def text(self) -> str:
        num_cut = self.size - len(self.head) - len(self.tail)
        middle = ""
        if num_cut:
            middle = f"\n[... {num_cut} characters are left out ...]\n"
        return f"{self.head}{middle}{self.tail}".strip()


class Frames:
    """A video with the interface of decord's reader: frames are arrays [height, width, 3] of uint8
    with a method `asnumpy`."""

    def __init__(self, pictures: list, fps: float):
        self.pictures = pictures
        self.fps = fps

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int):
        return array_of(self.pictures[index])

    def get_batch(self, indices):
        return array_of([self[int(index)] for index in indices])

    def get_avg_fps(self) -> float:
        return self.fps


class VideoFile(Frames):
    """The same over a video file, by PyAV. A frame is decoded when it is read."""

    def __init__(self, data: bytes):
        import av

        self.container = av.open(io.BytesIO(data))
        self.stream = self.container.streams.video[0]
        packets = self.container.demux(self.stream)
        self.times = sorted(packet.pts for packet in packets if packet.pts is not None)
        super().__init__([], float(self.stream.average_rate or 1))

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: int):
        time = self.times[index]
        self.container.seek(time, stream=self.stream)
        # a seek goes to the key frame before
        frame = next(frame for frame in self.container.decode(self.stream) if frame.pts >= time)
        return array_of(frame.to_ndarray(format="rgb24"))


def array_of(values):
    """A numpy array with the method `asnumpy`, as decord's arrays have it."""
    import numpy as np

    class Array(np.ndarray):
        def asnumpy(self):
            return np.asarray(self)

    return np.asarray(values).view(Array)


def check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS or max(width, height) >= MAX_RATIO * min(width, height):
        raise ValueError(
            f"a figure of {width} x {height} pixels cannot be shown: at most {MAX_PIXELS} pixels, "
            f"and sides of a ratio below {MAX_RATIO}"
        )


def describe(error: BaseException, name: str) -> str:
    """Type, message and line of an exception in the block with this name."""
    lines = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == name:
            lines.append(line)
    # without lines the block itself does not compile; with them the error may come from eval("1 +")
    # in it, and `lineno` is that of another text
    if isinstance(error, SyntaxError) and not lines and error.lineno:
        lines = [error.lineno]
    try:
        message = error.msg if isinstance(error, SyntaxError) else error
        text = str(message)[:MAX_ERROR]
    except BaseException as second:  # the exception may be of the program's own class
        text = f"its text cannot be made: {type(second).__name__[:100]}"
    text = f"{type(error).__name__[:100]}: {text}"
    if lines:
        text += f" (line {lines[-1]})"
    return text
