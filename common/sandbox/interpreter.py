"""The interpreter of one trajectory: blocks come in by a socket, what they have printed and drawn
goes out.

It runs in a child of server.py, and stands for nothing that it says: the program can change all of
it.
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

# characters that a block may print, more is cut in the middle; of an exception
MAX_TEXT, MAX_ERROR = 3900, 1000
MAX_FIGURES = 8  # of a block
MAX_PIXELS, MAX_RATIO = 4_000_000, 200  # of a figure; of its sides, which no image processor takes
MAX_BYTES = 2**25  # of a block's figures together, as PNG


class Session:
    """The state of a trajectory: its variables, its pictures, the figures of a block."""

    def __init__(self, connection: socket.socket):
        import matplotlib.figure
        import matplotlib.pyplot as plt
        import numpy as np
        from PIL import Image, ImageOps

        self.connection, self.plt, self.Image, self.ImageOps = connection, plt, Image, ImageOps
        self.namespace = {
            "__name__": "__main__",
            "plt": plt,
            "np": np,
            "Image": Image,
            "io": io,
            "base64": base64,
        }
        self.drawn: list[bytes] = []
        self.seen = self.blocks = 0  # pictures that the policy has seen; blocks so far
        self.entropy: Entropy | None = None  # from the first block on
        plt.show = lambda *_, **__: self.show([*map(plt.figure, plt.get_fignums())])
        matplotlib.figure.Figure.show = lambda figure, *_, **__: self.show([figure])

    def run(self) -> None:
        while job := self.receive():
            if self.entropy is None:
                self.entropy = Entropy(job["seed"])
            self.number_figures(job["shown"])  # of the block before
            for picture in job["pictures"]:
                self.bind(picture)
            self.send(b"begun")
            text, error = self.block(job["code"])
            reply = {"text": text, "error": error, "figures": list(map(len, self.drawn))}
            head = json.dumps(reply, ensure_ascii=False).encode(errors="replace")
            self.send(b"\n".join([head, b"".join(self.drawn)]))

    def block(self, code: str) -> tuple[str, str]:
        """(what it has printed, the exception that ended it)."""
        self.drawn, self.blocks, output, error = [], self.blocks + 1, Output(), ""
        if self.entropy:  # without one the caller's own random numbers stay as they are
            self.entropy.begin(self.blocks)
        name = f"<block {self.blocks}>"
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            try:
                exec(compile(code, name, "exec"), self.namespace)
            except BaseException as raised:
                error = describe(raised, name)
        return output.text(), error

    def show(self, figures: list) -> None:
        """What the policy gets to see of figures, at their own resolution; they are closed."""
        for figure in figures:
            if len(self.drawn) >= MAX_FIGURES:
                raise ValueError(f"a block shows at most {MAX_FIGURES} figures")
            try:
                # before memory
                check_size(*(round(inches * figure.dpi) for inches in figure.get_size_inches()))
                figure.savefig(buffer := io.BytesIO(), format="png", dpi="figure")
                check_size(*self.Image.open(buffer).size)  # a margin may have been added
            except BaseException:  # it would stand in the way of all later ones
                self.plt.close(figure)
                raise
            if sum(map(len, self.drawn)) + len(buffer.getvalue()) > MAX_BYTES:
                raise ValueError(f"the figures of a block have at most {MAX_BYTES >> 20} MB")
            self.drawn.append(buffer.getvalue())
            self.plt.close(figure)

    def number_figures(self, count: int) -> None:
        """The first `count` figures of a block become image_clue_k, as the policy was shown
        them."""
        for png in self.drawn[:count]:
            self.namespace[f"image_clue_{self.seen}"] = self.picture(png)
            self.seen += 1

    def bind(self, picture: dict) -> None:
        """A picture, or a video as its frames or as its file, gets its name."""
        frames = [base64.b64decode(frame) for frame in picture["frames"]]
        if picture["kind"] == "file":
            value = VideoFile(frames[0])
        else:
            pictures = [self.picture(frame) for frame in frames]
            value = (
                pictures[0]
                if picture["kind"] == "image"
                else Frames(pictures, picture.get("fps") or 1.0)
            )
        self.namespace[picture["name"]] = value
        self.seen += picture["seen"]

    def picture(self, encoded: bytes):
        """Upright, without transparency, of 8 bits: as the policy sees it (`to_rgb` of
        common.pictures)."""
        image = self.ImageOps.exif_transpose(self.Image.open(io.BytesIO(encoded)))
        if image.mode.startswith("I;16"):
            image = image.convert("I").point(lambda value: value / 256).convert("L")
        elif image.has_transparency_data:
            image = image.convert("RGBA")
            image = self.Image.alpha_composite(self.Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")

    def receive(self) -> dict | None:
        head = self.read(8)
        return json.loads(self.read(int.from_bytes(head, "big"))) if head else None

    def read(self, size: int) -> bytes:
        """Nothing at the end. Without a buffer: what comes in one piece or in several leaves memory
        alike."""
        data = self.connection.recv(size, socket.MSG_WAITALL)
        while data and len(data) < size:
            more = self.connection.recv(size - len(data), socket.MSG_WAITALL)
            data = data + more if more else b""
        return data

    def send(self, message: bytes) -> None:
        self.connection.sendall(len(message).to_bytes(8, "big") + message)


class Entropy:
    """In the place of the system's: what is drawn without a seed follows from the trajectory, the
    block, and how much it has drawn before, so that a block that is run again draws the same. Not
    os.urandom itself, and what asks it."""

    def __init__(self, seed: str):
        import numpy as np

        self.seed = seed
        self.block = self.count = 0
        seed_with = random.Random.seed

        def seed_generator(generator, a=None, version=2):
            seed_with(generator, self.draw(32) if a is None else a, version)

        random.Random.seed = seed_generator
        random.seed = random._inst.seed  # _inst is behind the functions of the module
        np.random.bit_generator.randbits = lambda bits: int.from_bytes(self.draw(bits // 8), "big")
        uuid.uuid4 = lambda: uuid.UUID(bytes=self.draw(16), version=4)
        random.seed()
        np.random.seed()

    def begin(self, block: int) -> None:
        self.block, self.count = block, 0

    def draw(self, size: int) -> bytes:
        self.count += 1
        return hashlib.shake_128(f"{self.seed}/{self.block}/{self.count}".encode()).digest(size)


class Output(io.TextIOBase):
    """The first and the last characters of what is printed."""

    def __init__(self) -> None:
        self.head, self.tail, self.size = "", "", 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.size += len(text)
        room = MAX_TEXT // 2 - len(self.head)
        self.head += text[:room]
        self.tail = (self.tail + text[max(room, 0) :])[-(MAX_TEXT // 2) :]
        return len(text)

    def text(self) -> str:
        left_out = self.size - len(self.head) - len(self.tail)
        middle = f"\n[... {left_out} characters are left out ...]\n" if left_out else ""
        return f"{self.head}{middle}{self.tail}".strip()


class Frames:
    """A video as decord's reader shows it: frames as arrays [height, width, 3] of uint8, with
    `asnumpy`."""

    def __init__(self, pictures: list, fps: float):
        self.pictures, self.fps = pictures, fps

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int):
        return array_of(self.pictures[index])

    def get_batch(self, indices):
        return array_of([self[int(index)] for index in indices])

    def get_avg_fps(self) -> float:
        return self.fps


class VideoFile(Frames):
    """The same over a video file, by PyAV; a frame is decoded when it is asked for."""

    def __init__(self, data: bytes):
        import av

        self.container = av.open(io.BytesIO(data))
        self.stream = self.container.streams.video[0]
        self.times = sorted(
            packet.pts for packet in self.container.demux(self.stream) if packet.pts is not None
        )
        super().__init__([], float(self.stream.average_rate or 1))

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: int):
        time = self.times[index]
        self.container.seek(time, stream=self.stream)
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
            f"a figure of {width} x {height} pixels cannot be shown: at most {MAX_PIXELS} pixels"
        )


def describe(error: BaseException, name: str) -> str:
    """Type, text and line of an exception in a block."""
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == name
    ]
    lines = [error.lineno] if isinstance(error, SyntaxError) else lines
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)[:MAX_ERROR]
    except BaseException as second:
        text = f"its text cannot be made: {type(second).__name__[:100]}"
    return f"{type(error).__name__[:100]}: {text}" + (f" (line {lines[-1]})" if lines else "")
