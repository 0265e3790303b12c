"""Reward functions, chosen by a row's `data_source`. All have verl's signature:

fn(data_source, solution_str, ground_truth, extra_info=None) -> number, or a mapping with the key
"score"

It may be an `async def`: then up to 64 calls run concurrently. fn.timeout_s is the deadline of a
call. A function of a user may have TRL's signature instead (common/rewards/trl.py).
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from math import fsum, inf, isnan, nan
from types import MappingProxyType

from common.ending import sign_of_life
from common.progress import Progress, say
from common.rewards.trl import NOT_APPLICABLE, has_trl_signature, with_verl_signature
from common.types import Episode, Row
from common.workers.pool import Pool, load_function
from common.workers.process import Worker, describe

RewardFunction = Callable[..., float | Mapping]
# data_source, text, ground_truth, extra_info
ScoringJob = tuple[str, str, object, Mapping | None]
FULL_MARKS = 1.0 - 1e-6  # 1 but for rounding
AT_ONCE = 64  # calls of an `async def` that run concurrently
CANCEL_S = 1.0  # seconds that late calls get to close what they hold
SLACK_S = 10.0  # how much later the deadline of a batch is than that of its calls
MAX_SCORE = 1e6  # in magnitude: the square of a larger one, or its gradient, would ruin the run
MAX_FAILURE = 198  # characters of a tool's failure that the error of its episode quotes
TIMEOUT = "timeout"  # start of the error of a call that takes too long, as `Worker` writes it


def built_in(module: str, name: str, *imports: str) -> RewardFunction:
    """A function with verl's signature that calls `name`(response, ground truth) of
    common.rewards.MODULE.

    Its first call imports the module. imports: what else that call imports.
    """
    module = f"common.rewards.{module}"

    def reward(data_source, solution_str, ground_truth, extra_info=None) -> dict:
        scorer = getattr(importlib.import_module(module), name)
        return scorer(solution_str, ground_truth)

    reward.modules = (module, *imports)
    return reward


countdown_reward = built_in("countdown", "score")
gsm8k_reward = built_in("math", "score_gsm8k")
boxed_reward = built_in("math", "score_boxed", "sympy")
dapo_reward = built_in("math", "score_dapo")
geo3k_reward = built_in("geometry", "score_geo3k", "sympy")
visual_qa_reward = built_in("visual_qa", "score_visual_qa", "sympy")
reasoning_gym_reward = built_in("reasoning_gym", "score", "reasoning_gym")

# data_source pattern -> function; the first that matches is taken
REWARD_FUNCTIONS: dict[str, RewardFunction] = {
    "reasoning_gym/*": reasoning_gym_reward,  # what common.prepare.reasoning_gym writes
    "visual_qa/*": visual_qa_reward,  # Pixel Reasoner's rows: common.data.visual_qa
    "tiny-vl": visual_qa_reward,
    "*countdown*": countdown_reward,
    "*gsm8k": gsm8k_reward,
    "math/*": boxed_reward,  # what common.prepare.math writes
    "*MATH*": boxed_reward,  # lighteval/MATH, HuggingFaceH4/MATH-500, ...
    "numina*": boxed_reward,
    "amc*": boxed_reward,
    "*svamp*": boxed_reward,
    "*mawps*": boxed_reward,
    "math_dapo*": dapo_reward,  # as in verl, like the next two
    "math": dapo_reward,
    "aime*": dapo_reward,
    "hiyouga/geometry3k": geo3k_reward,
    "*geo3k*": geo3k_reward,
}


def reward_function(data_source: str) -> RewardFunction:
    """The built-in function for a data_source; ValueError if there is none."""
    for pattern, function in REWARD_FUNCTIONS.items():
        if fnmatchcase(data_source, pattern):
            return function
    raise ValueError(
        f"no built-in reward function for data_source {data_source!r}; known are "
        f"{', '.join(REWARD_FUNCTIONS)}. "
        "Give your own with --reward-function FILE.py:NAME"
    )


def score_response(
    fn: RewardFunction,
    data_source: str,
    solution_str: str,
    ground_truth,
    extra_info: Mapping | None = None,
) -> dict[str, float | str]:
    """What fn returns, as a dict of floats and strings with a usable "score"; else ValueError."""
    result = fn(
        data_source=data_source,
        solution_str=solution_str,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )
    return read_result(result, fn, data_source)


def read_result(result: object, fn: RewardFunction, data_source: str) -> dict[str, float | str]:
    """The result of a reward function as a dict of floats and strings. ValueError without a
    usable "score"."""
    label = f"reward function {getattr(fn, '__name__', fn)} on data_source {data_source!r}"
    if inspect.iscoroutine(result):
        result.close()
        raise ValueError(
            f"{label} returned a coroutine: write it as a plain `async def`, without a decorator"
        )
    if not isinstance(result, Mapping):
        result = {"score": result}
    if "score" not in result:
        raise ValueError(
            f'{label} returned a mapping without the key "score": {sorted(map(str, result))}'
        )
    values = {str(key): float_or_str(value) for key, value in result.items()}
    if not is_usable(values["score"]):
        expected = f"expected a finite number of at most {MAX_SCORE:g} in magnitude"
        raise ValueError(f"{label} returned the score {result['score']!r:.80}, {expected}")
    return values


def is_usable(score) -> bool:
    """Whether a score can be trained on; NaN cannot."""
    return isinstance(score, float) and abs(score) <= MAX_SCORE


def is_correct(rewards: Mapping[str, float | str]) -> bool:
    """Whether a response has full marks, by "acc" if the reward function returns one, as in verl,
    else by its score."""
    accuracy = rewards.get("acc")
    if not isinstance(accuracy, float):
        accuracy = rewards["score"]
    return accuracy >= FULL_MARKS


class RewardWorkers(Pool):
    """At most `max_workers` processes that score with the function FILE.py:NAME, or else with the
    built-in functions.

    The deadline of a call is the function's `timeout_s`, or else `timeout_s` here, in seconds; the
    memory limit is that of `Worker`, errors are those of `Pool`. ValueError if the file is missing
    or has an error. An `async def` gets one process, with up to `AT_ONCE` concurrent calls.
    sources: data_sources that the built-in functions will score; what those import is loaded before
    the first deadline.
    """

    def __init__(
        self,
        function_spec: str | None,
        max_workers: int,
        timeout_s: float,
        memory_gib: float = 4.0,
        sources: Iterable[str] = (),
    ):
        modules: set[str] = set()
        for source in sorted(sources):
            modules.update(reward_function(source).modules)
        make = make_built_in_scorer
        spec = ",".join(sorted(modules))
        if function_spec:
            make = make_scorer
            spec = function_spec
        self.job_timeout_s = timeout_s

        def new_worker() -> Worker:
            return Worker(make, spec, self.job_timeout_s, memory_gib)

        super().__init__("a reward worker did not start", new_worker, max_workers)
        self.has_own_function = bool(function_spec)
        # `Pool` has started one worker, with the default deadline. That worker has loaded the
        # function and reports the function's own deadline: from here on it holds for this worker,
        # and for those that `new_worker` makes later.
        (first,) = self.workers
        self.timeout_s = first.facts["timeout_s"] or timeout_s
        self.is_async = first.facts["is_async"]
        self.is_trl = first.facts["is_trl"]
        if self.is_trl:
            name = function_spec.rpartition(":")[2]
            say(f"reward {name}: TRL's signature, called with one completion at a time")
        self.job_timeout_s = self.timeout_s
        if self.is_async:
            self.max_workers = 1
            self.job_timeout_s += SLACK_S  # a job is a batch of calls
        first.timeout_s = self.job_timeout_s

    def score(self, jobs: Sequence[ScoringJob]) -> list[dict[str, float | str]]:
        """The `score_response` of each job, in their order; {"error": reason} without a "score" for
        one that failed.

        An answer that a built-in function cannot compare within its deadline is wrong: the policy
        caused it.
        """
        if self.is_async:
            return self.score_in_batches(jobs)
        results = self.run(jobs, "rewards")
        if self.has_own_function:
            return results
        num_slow = 0
        for i, result in enumerate(results):
            if str(result.get("error", "")).startswith(TIMEOUT):
                results[i] = score_as_wrong(jobs[i])
                num_slow += 1
        if num_slow:
            print(
                f"rewards: {num_slow} answers took longer than {self.timeout_s:g} s to "
                "compare and count as wrong",
                flush=True,
            )
        return results

    def score_in_batches(self, jobs: Sequence[ScoringJob]) -> list[dict[str, float | str]]:
        """`score` with an `async def`."""
        results = []
        for start in Progress("rewards", range(0, len(jobs), AT_ONCE)):
            results += self.score_batch(jobs[start : start + AT_ONCE])
            sign_of_life()  # while a judge is down, each batch may take its whole deadline
        return results

    def score_batch(self, jobs: Sequence[ScoringJob]) -> list[dict[str, float | str]]:
        """`score` of calls that run concurrently. If one of them blocks the others or ends the
        process, each is repeated alone, so that only its own response fails."""
        # to the worker a whole batch is one job (see `Scorer`)
        (reply,) = self.run([(self.timeout_s, jobs)], "responses")
        if "results" in reply:
            return reply["results"]
        if len(jobs) == 1:
            return [reply]
        results = []
        for job in jobs:
            sign_of_life()
            results += self.score_batch([job])
        return results

    def try_out(
        self, function_spec: str, row, environment_info: Mapping = MappingProxyType({})
    ) -> None:
        """Score a row with its truth as the response, and if that fails, with an empty response.
        ValueError if both fail; a score of None, which TRL allows, is no failure. environment_info:
        the rewards of an environment, under the names that `scoring_job` gives them."""
        texts = {"its truth as the response": row.truth, "an empty response": ""}
        failures = ""
        for label, text in texts.items():
            extra_info = row.extra_info | {"last_turn": text, "trajectory": text}
            extra_info |= environment_info
            if self.is_trl:
                # nothing is encoded here: a byte stands for a token
                extra_info |= {"prompt": row.prompt, "completion_ids": [*text.encode()]}
            (reply,) = self.score([(row.data_source, text, row.ground_truth, extra_info)])
            if "score" in reply or NOT_APPLICABLE in reply["error"]:
                return
            failures += f"\n  with {label}: {reply['error']}"
        call = (
            "NAME(data_source=..., solution_str=..., ground_truth=..., extra_info=...), for one "
            'response, and returns a finite number or a dict with the key "score"'
        )
        if self.is_trl:
            call = (
                "NAME(prompts=[...], completions=[...], completion_ids=[...], and each column of "
                "the row's extra_info as a list of one), and returns a list of one number or None"
            )
        raise ValueError(
            f"--reward-function {function_spec} cannot score the first row:{failures}\n"
            f"It is called as {call}"
        )


def score_as_wrong(job: ScoringJob) -> dict[str, float | str]:
    """The built-in score of a response that says nothing."""
    data_source, _, ground_truth, extra_info = job
    extra_info = {**(extra_info or {}), "last_turn": "", "trajectory": ""}
    return score_response(reward_function(data_source), data_source, "", ground_truth, extra_info)


class Scorer:
    """What a worker runs: a job is one response, or for an `async def` (deadline in seconds,
    responses of a batch)."""

    def __init__(self, function: RewardFunction | None):
        self.function = function  # None: the built-in ones
        is_trl = function is not None and has_trl_signature(function)
        if is_trl:
            self.function = with_verl_signature(function)
        is_async = inspect.iscoroutinefunction(function)
        self.runner = None
        if is_async:
            import asyncio  # here: plain functions do without

            # one loop for all batches: a client stays bound to the loop it was first used in
            self.runner = asyncio.Runner()
        self.facts = {"timeout_s": deadline_of(function), "is_async": is_async, "is_trl": is_trl}

    def __call__(self, job) -> dict:
        if self.runner:
            return {"results": self.runner.run(score_together(self.function, *job))}
        data_source = job[0]
        return score_response(self.function or reward_function(data_source), *job)


def deadline_of(function: RewardFunction | None) -> float | None:
    """The function's own `timeout_s`, if it has one. ValueError unless it is a number of
    seconds."""
    timeout_s = getattr(function, "timeout_s", None)
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < inf:
        raise ValueError(
            f"the reward function's timeout_s is {timeout_s!r:.40}, expected seconds above 0"
        )
    return timeout_s


def make_scorer(function_spec: str) -> Scorer:
    return Scorer(load_function(function_spec, "--reward-function"))


def make_built_in_scorer(modules: str) -> Scorer:
    """modules: what the functions need, separated by commas."""
    for module in modules.split(","):
        if module:
            importlib.import_module(module)
    return Scorer(None)


async def score_together(
    function: RewardFunction, timeout_s: float, jobs: Sequence[ScoringJob]
) -> list[dict]:
    """The `score_response` of each job, or {"error": reason}; the calls run concurrently."""
    import asyncio

    calls = [asyncio.create_task(await_score(function, *job)) for job in jobs]
    _, late = await asyncio.wait(calls, timeout=timeout_s)
    for call in late:
        call.cancel()
    if late:
        await asyncio.wait(late, timeout=CANCEL_S)
    results = []
    for call in calls:
        if call in late:
            results.append({"error": f"{TIMEOUT} after {timeout_s:g} s"})
        elif call.cancelled():
            results.append({"error": "the call was cancelled"})
        elif error := call.exception():
            # the process may still hold that memory: it has to end
            if isinstance(error, MemoryError):
                raise error
            results.append({"error": describe(error)})
        else:
            results.append(call.result())
    return results


async def await_score(
    fn: RewardFunction,
    data_source: str,
    solution_str: str,
    ground_truth,
    extra_info: Mapping | None = None,
) -> dict[str, float | str]:
    """`score_response` with an `async def`."""
    result = await fn(
        data_source=data_source,
        solution_str=solution_str,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )
    return read_result(result, fn, data_source)


def score_episodes(
    episodes: list[Episode], rows: Mapping[int, Row], workers: RewardWorkers, tokenizer
) -> None:
    """Fill `rewards` of each episode from the text that the policy sampled, or from its
    environment's reward, if it has one and the user gives no function. rows: prompt index -> Row.

    extra_info["last_turn"] is the last turn, extra_info["trajectory"] the whole response, with what
    tools returned. If scoring fails (an exception, a timeout, a dead worker, a score that is not
    usable), the rewards are {"score": nan, "error": reason}.
    """
    jobs = []
    job_episodes = []
    for episode in episodes:
        if episode.finish_reason in ("tool_failed", "unreadable"):
            error = episode.finish_reason
            if episode.calls:
                error += f": {episode.calls[-1]['text'][:MAX_FAILURE]}"
            episode.set_rewards({"score": nan, "error": error})
        elif episode.environment_reward is not None and not workers.has_own_function:
            episode.set_rewards(environment_rewards(episode.environment_reward))
        else:
            row = rows[episode.prompt_index]
            jobs.append(scoring_job(episode, row, tokenizer, workers.is_trl))
            job_episodes.append(episode)
    for episode, result in zip(job_episodes, workers.score(jobs), strict=True):
        episode.set_rewards(with_score(result))
    for episode in episodes:
        if episode.turn_rewards:
            turn_rewards = [reward for _, reward in episode.turn_rewards]
            episode.rewards["turns"] = fsum(turn_rewards)
            episode.rewards["first_turn_accuracy"] = float(turn_rewards[0] >= FULL_MARKS)
            episode.rewards["last_turn_accuracy"] = float(turn_rewards[-1] >= FULL_MARKS)
    print_errors([episode.rewards for episode in episodes])


def environment_rewards(reward: float) -> dict[str, float | str]:
    if is_usable(reward):
        return {"score": reward}
    return {
        "score": nan,
        "error": f"the environment's reward {reward:g} is above {MAX_SCORE:g} in magnitude",
    }


def scoring_job(episode: Episode, row: Row, tokenizer, is_trl: bool) -> ScoringJob:
    """is_trl: whether the function has TRL's signature, which also wants the prompt and the ids."""
    turns = sampled_turns(episode, tokenizer)
    extra_info = dict(row.extra_info)
    extra_info["last_turn"] = turns[-1] if turns else ""
    extra_info["trajectory"] = tokenizer.decode(episode.response_ids, skip_special_tokens=True)
    if episode.turn_rewards:
        extra_info["turn_rewards"] = [reward for _, reward in episode.turn_rewards]
    if episode.environment_reward is not None:
        extra_info["environment_reward"] = episode.environment_reward
    if is_trl:
        extra_info["prompt"] = row.prompt
        extra_info["completion_ids"] = episode.response_ids
    return row.data_source, "\n".join(turns), row.ground_truth, extra_info


def with_score(result: Mapping) -> Mapping:
    """A result of `RewardWorkers.score`; the score of what failed is NaN."""
    if "score" in result:
        return result
    return {"score": nan, "error": result["error"]}


def print_errors(rewards: Sequence[Mapping]) -> None:
    """Print how many responses could not be scored, and why the first could not."""
    errors = [str(item["error"]) for item in rewards if isnan(item["score"])]
    if errors:
        print(
            f"rewards: {len(errors)} of {len(rewards)} responses not scored, the first: "
            f"{errors[0]}",
            flush=True,
        )


def sampled_turns(episode, tokenizer) -> list[str]:
    """The text of each turn that the policy sampled, without special tokens and tool output."""
    turns = []
    start = 0
    for is_sampled, run in groupby(episode.loss_mask):
        end = start + len(list(run))
        if is_sampled:
            ids = episode.response_ids[start:end]
            turns.append(tokenizer.decode(ids, skip_special_tokens=True))
        start = end
    return turns


def float_or_str(value) -> float | str:
    """Numbers, booleans and one-element arrays as float; None as ""; everything else as str."""
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value)
