"""A server of several processes through ``sgl.Engine``, and its answers.  Usage: served.py JSON   (the last line is JSON)"""

import asyncio
import json
import sys
import time

from worker import prompts

AT_ONCE = 4
EXIT_S = 60


def requests_of(seed, count):
    """Prompts with shared beginnings of several lengths, some longer than a chunk, with numbers of tokens to make."""
    rng, prompt = prompts(seed)
    stems = [prompt(length) for length in (48, 130, 200, 330)]
    for _ in range(count):
        stem = rng.choice(stems)
        yield stem[: rng.choice((len(stem), len(stem) // 2, len(stem) - 5))] + prompt(rng.randrange(1, 60)), rng.randrange(2, 9)


async def answers(engine, seed, count):
    """The requests, several at a time; told in their order."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def answer(tokens, new_tokens):
        async with gate:
            sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
            told = await engine.async_generate(input_ids=tokens, sampling_params=sampling)
            cached = told["meta_info"].get("cached_tokens_details") or {}
            return {"tokens": told["output_ids"], "host": cached.get("host", 0)}

    return await asyncio.gather(*(answer(*request) for request in requests_of(seed, count)))


def end(engine):
    """As the server does on SIGTERM: its schedulers leave their loops, give back what they hold and exit."""
    from sglang.srt.managers.io_struct import ShutdownReq
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    engine.tokenizer_manager._subprocess_watchdog.stop()
    engine.tokenizer_manager._dispatch_to_scheduler(ShutdownReq())
    deadline = time.monotonic() + EXIT_S
    while collect_scheduler_processes():
        assert time.monotonic() < deadline, f"schedulers have not ended within {EXIT_S} s"
        time.sleep(0.05)
    engine.shutdown()


def main():
    import sglang

    config = json.loads(sys.argv[1])
    engine = sglang.Engine(
        model_path=config["model"], device="cpu", attention_backend="torch_native", sampling_backend="pytorch", dtype="float32",
        page_size=16, max_running_requests=4, context_length=1024, chunked_prefill_size=64, skip_tokenizer_init=True, random_seed=1,
        log_level="warning", **config["options"],
    )  # fmt: skip
    out = []
    for seed in config["seeds"]:
        out.append(engine.loop.run_until_complete(answers(engine, seed, config["requests"])))
        engine.flush_cache()
    end(engine)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
