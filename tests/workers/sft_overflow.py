"""Run by torchrun: sft.py in fp16, with a loss that overflows in the second step, on rank 1
alone."""

import sft
from common.flags import parse
from common.script import run


def main(args: sft.Args) -> None:
    plain, calls = sft.cross_entropy, []

    def overflowing(logprobs, num_loss_tokens, world_size):
        import torch.distributed as dist

        calls.append(dist.get_rank())
        loss = plain(logprobs, num_loss_tokens, world_size)
        return loss * 1e30 if calls == [1, 1] else loss

    sft.cross_entropy = overflowing
    sft.main(args)


if __name__ == "__main__":
    args, _ = parse(sft.Args, sft.DEMO, sft.__doc__)
    run(main, args)
