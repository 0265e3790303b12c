"""A warm process that has imported what the scripts import, and forks their ranks: most of a short
run is imports.

`python tests/zygote.py SOCKET` listens at once, and imports when the first run is asked for. It
runs nothing itself: no kernel, no thread, no process group, so that a forked rank has what a fresh
interpreter has after the same imports (test_zygote.py compares a run of each, bit by bit). For each
run a launcher is forked, which stands for torchrun: it forks the ranks, and ends them all when one
fails or when the test that asked has gone.

pytest's workers (pytest -n 2) are forked from it, too.

What a fork cannot show stays with real launches (helpers.py: `torchrun`): what imports do, faults,
signals and kills.
"""

import ctypes
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM = not Path("/dev/nvidiactl").exists()  # CUDA does not survive a fork
ZYGOTE = "TESTS_ZYGOTE"  # where to find it: in the environment, for pytest's workers
# A test that joins a process group of one leaves these behind; a script must not think it is part
# of it.
RANK_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
RANK_VARIABLES |= {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
# What libraries read when they are imported: what common/engine sets for vLLM, and that no threads
# are started.
AT_IMPORT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
AT_IMPORT |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OPENBLAS_NUM_THREADS": "1"}
AT_IMPORT |= {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Beside all of common: what that, transformers, vLLM, tyro and matplotlib leave for their first
# use.
MODULES = """
PIL.BmpImagePlugin PIL.GifImagePlugin PIL.JpegImagePlugin PIL.PpmImagePlugin
compressed_tensors fsspec jsonschema loguru matplotlib.backends.backend_agg matplotlib.pyplot
mpl_toolkits.mplot3d pandas psutil pyarrow.compute pyarrow.pandas_compat pytest
tyro._backends._tyro_backend typeguard torch.distributed.checkpoint._fsspec_filesystem
torch.distributed.checkpoint.state_dict torch.distributed.fsdp torch.nn.attention.bias torch.testing
torchvision.transforms.v2 transformers.generation.utils transformers.masking_utils
transformers.models.llama.modeling_llama transformers.models.qwen2.modeling_qwen2
transformers.models.qwen2.tokenization_qwen2 transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
transformers.models.qwen2_5_vl.processing_qwen2_5_vl transformers.tokenization_mistral_common vllm
vllm.distributed.elastic_ep.elastic_execute vllm.entrypoints.launchers.cli_args vllm.entrypoints.llm
vllm.model_executor.layers.quantization.compressed_tensors.utils
vllm.model_executor.layers.quantization.online.base vllm.model_executor.model_loader.default_loader
vllm.model_executor.models.llama vllm.model_executor.models.qwen2
vllm.model_executor.models.qwen2_5_vl vllm.plugins.lora_resolvers.filesystem_resolver
vllm.plugins.lora_resolvers.hf_hub_resolver vllm.utils.cpu_triton_utils
vllm.v1.attention.backends.cpu_attn vllm.v1.core.sched.scheduler vllm.v1.executor.uniproc_executor
vllm.v1.worker.cpu_worker
"""
# a file in which each run gets a line: processor seconds of its ranks, test, script
COSTS = "TESTS_ZYGOTE_COSTS"
# in the environment of a run that draws its curves.png: that takes 0.4 processor seconds, and
# test_logger.py draws them, too
CURVES = "TESTS_CURVES"
DEMO_EVAL_ROWS = 64  # of the 1024 that the demo of a text model brings along
PR_SET_PDEATHSIG = 1
PATIENCE_S = 30  # between SIGTERM and SIGKILL, as torchrun has it


# --- the tests' side ------------------------------------------------------------------------------


def script_environment(**extra: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **extra}


class Zygote:
    """One for all workers of pytest: the first process that has no address given starts it."""

    def __init__(self, environment: dict[str, str], tests: Iterable[str] = ()):
        """tests: folders and files that workers of pytest will collect."""
        self.folder = tempfile.TemporaryDirectory(prefix="zygote-")
        self.address = f"{self.folder.name}/socket"
        self.log = Path(self.folder.name, "log")
        with self.log.open("w") as log:
            command = [sys.executable, __file__, self.address, str(os.getpid()), *tests]
            self.process = subprocess.Popen(
                command, env=environment | AT_IMPORT, stdout=log, stderr=log
            )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


class Forked:
    """A run under way, as `subprocess.Popen` has it. `arguments` are what would follow `python`;
    `ranks` = 0 is a process without torchrun; `files` are its stdout and stderr, and its stdin if
    it has one. It is killed when nobody holds this object any more."""

    def __init__(
        self,
        address: str,
        arguments: list[str],
        environment: dict,
        cwd: Path,
        ranks: int,
        *files,
    ):
        self.address, self.arguments, self.returncode = Path(address), arguments, None
        self.connection = socket.socket(socket.AF_UNIX)
        end = time.monotonic() + PATIENCE_S
        while self.connection.connect_ex(address):  # it starts
            assert time.monotonic() < end, self.log()
            time.sleep(0.01)
        request = pickle.dumps((arguments, environment, str(cwd), ranks))
        numbers = [file.fileno() for file in files]
        socket.send_fds(self.connection, [len(request).to_bytes(8, "big")], numbers)
        self.connection.sendall(request)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutError."""
        if self.returncode is None:
            self.connection.settimeout(timeout)
            try:
                reply = self.connection.recv(64)
            except (TimeoutError, BlockingIOError):
                raise TimeoutError from None
            except OSError:
                reply = b""
            assert reply, f"the warm process has died: {self.log()}"
            self.returncode = int(reply)
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(TimeoutError):
            return self.wait(0.0)
        return None

    def kill(self) -> None:
        """SIGKILL to all ranks and what they have started; returns when they are gone."""
        if self.returncode is None:
            self.connection.shutdown(socket.SHUT_WR)
            self.wait()

    def log(self) -> str:
        return self.address.with_name("log").read_text()[-3000:]


def run(
    address: str, arguments: list[str], environment: dict, cwd: Path, ranks: int, timeout: float
) -> subprocess.CompletedProcess:
    """As `subprocess.run` of a `Forked`, with its output."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        process, late = Forked(address, arguments, environment, cwd, ranks, out, err), False
        try:
            process.wait(timeout)
        except TimeoutError:
            late = True
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess(arguments, process.returncode, out.read(), err.read())
    if late:
        raise TimeoutError(
            f"{arguments}: not done after {timeout} s\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        )
    return done


def pytest_worker(*arguments: str) -> None:
    """Stand for `python ARGUMENTS`, with which pytest-xdist starts a worker, until that ends."""
    files = (sys.stdout, sys.stderr, sys.stdin)
    options = arguments[arguments.index("-c") :]
    worker = Forked(os.environ[ZYGOTE], options, dict(os.environ), Path.cwd(), 0, *files)
    sys.exit(worker.wait())


# --- the warm process -----------------------------------------------------------------------------


def serve(address: str, parent: str, *tests: str) -> None:
    die_with_parent(int(parent))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, reap)
    warm = False
    while True:
        connection, _ = listener.accept()
        if not warm:
            rewrite_assertions(tests)
            import_all()
            warm = True
        refuse_threads()
        own = os.getpid()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(own)
            leave(lead, connection)
        connection.close()


def reap(*_) -> None:
    """Wait for launchers that have ended: their processor time then counts as that of the tests."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def refuse_threads() -> None:
    """A fork has one thread, and what the others held stays locked."""
    if tasks := sorted(os.listdir("/proc/self/task"), key=int)[1:]:
        names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks]
        raise SystemExit(f"threads before a fork: {names}: which import has started them?")


def import_all() -> None:
    gc.disable()  # imports leave little to collect
    for path in sorted(ROOT.glob("common/**/[!_]*.py")):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for name in MODULES.split():
        # of another version, or without vLLM: that costs time, no more
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    with suppress(ImportError):
        auto = importlib.import_module("transformers.models.auto.video_processing_auto")
        list(auto.VIDEO_PROCESSOR_MAPPING.values())  # a processor that is loaded imports them all
    prepare_vllm()
    importlib.import_module(
        "common.assets.build.tiny"
    ).demo_tables()  # which most runs write for themselves
    gc.freeze()  # a collection in a rank need not walk, and so copy, all that was imported
    gc.enable()


def prepare_vllm() -> None:
    """Once for all ranks: its kernels in place of Triton's, for which it looks in every module, and
    its loggers."""
    with suppress(ImportError, AttributeError):  # another version
        platform = importlib.import_module("vllm.platforms").current_platform
        platform.register_triton_kernel_overrides()
        type(platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
        settings = importlib.import_module("vllm.config.logging").LoggingConfig()
        importlib.import_module("vllm.logger").configure_logging_if_needed(settings)


def rewrite_assertions(tests: Iterable[str]) -> None:
    """Rewrite the assertions of test files as pytest does, once for all its workers. Each of them
    would take seconds for it where there is no bytecode beside the files: in a clean checkout, or
    with PYTHONDONTWRITEBYTECODE."""
    rewritten = {}
    # another version; or what is no Python, as a worker will tell
    with suppress(ImportError, AttributeError, TypeError, SyntaxError, ValueError):
        rewrite = importlib.import_module("_pytest.assertion.rewrite")
        rewrite_file = rewrite._rewrite_test
        for place in tests:
            path = Path(place.partition("::")[0]).resolve()
            for file in [path, *path.rglob("test_*.py")]:
                cached = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
                if file.is_file() and not cached.exists():
                    rewritten[file] = rewrite_file(file, None)

        def rewrite_unless_done(file: Path, config: object) -> tuple:
            return rewritten.get(file) or rewrite_file(file, config)

        rewrite._rewrite_test = rewrite_unless_done


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def leave(function, *arguments) -> None:
    """Call it in a forked process, which ends as an interpreter would: nothing may return into
    `serve`."""
    code = 1
    try:
        function(*arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def lead(connection: socket.socket) -> None:
    """Fork the ranks of one run, and send its exit code: that of the process, or 1 if one of
    several has failed."""
    head, files, *_ = socket.recv_fds(connection, 8, 3)
    size, request = int.from_bytes(head, "big"), b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    arguments, environment, cwd, ranks = pickle.loads(request)
    for file, number in zip(files, (1, 2, 0)):
        os.dup2(file, number)
        os.close(file)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running, launcher = {}, os.getpid()
    for rank in range(ranks or 1):
        own = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": 0,
        }
        own |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_RESTART_COUNT": 0}
        added = {name: str(value) for name, value in own.items()} if ranks else {}
        if not (pid := os.fork()):
            connection.close()
            die_with_parent(launcher)
            leave(become, arguments, environment | added, cwd)
        running[os.pidfd_open(pid)] = pid
    failed, kill_at, seconds = 0, None, []
    while running:
        wait = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select([connection, *running], [], [], wait)
        if connection in ready or not ready:  # the test is gone, or patience is at an end
            for pid in running.values():
                kill_family(pid)
            ready = list(running)
        for descriptor in ready:
            _, status, usage = os.wait4(running.pop(descriptor), 0)
            seconds.append(round(usage.ru_utime + usage.ru_stime, 1))
            os.close(descriptor)
            code = os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed, kill_at = (1 if ranks else code), time.monotonic() + PATIENCE_S
                for pid in running.values():
                    os.kill(pid, signal.SIGTERM)
    if COSTS in os.environ:
        with open(os.environ[COSTS], "a") as file:
            print(*seconds, environment.get("PYTEST_CURRENT_TEST"), *arguments[:1], file=file)
    with suppress(OSError):
        connection.sendall(str(failed).encode())


def kill_family(pid: int) -> None:
    """A rank leads a session; workers that it started have sessions of their own, and die with
    it."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def become(arguments: list[str], environment: dict[str, str], cwd: str) -> None:
    """What `python ARGUMENTS` would do, given its environment."""
    fixed = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), **AT_IMPORT}
    if changed := [name for name, value in fixed.items() if environment.get(name, value) != value]:
        raise SystemExit(f"{', '.join(changed)} are read at import: run_script(..., fresh=True)")
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv = [sys.executable, *arguments]
    if arguments[0] == "-c":
        sys.argv = ["-c"]
        exec(arguments[1], {"__name__": "__main__"})
        return
    leave_out(environment)
    sys.modules["numpy"].random.seed()  # as at their import; `random` does so by itself at a fork
    sys.modules["torch"].seed()
    if arguments[0] == "-m":
        sys.path[0] = cwd
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(cwd, arguments[0]).parent)
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def leave_out(environment: dict[str, str]) -> None:
    """What most runs do in vain: curves.png, and a thousand rows of the demo to evaluate on."""
    if CURVES not in environment:
        sys.modules["common.logger"].draw_curves = lambda run_dir: None
    tables = sys.modules["common.assets.build.tiny"].demo_tables()
    tables["eval"] = tables["eval"].slice(0, DEMO_EVAL_ROWS)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        pytest_worker(*sys.argv[2:])
    serve(*sys.argv[1:])
