"""Shared by tests: a batch during which somebody loses its blocks every third step."""


def generate_with_preemption(llm, prompts, params):
    """LLM.generate with one running sequence preempted before every third step; returns the outputs."""
    scheduler, plan = llm.engine.loop.scheduler, llm.engine.loop.scheduler.plan
    before, steps = scheduler.stats().num_preemptions, 0

    def preempting_plan():
        nonlocal steps
        steps += 1
        if steps % 3 == 0 and scheduler.running():
            scheduler.preempt(scheduler.running()[steps % len(scheduler.running())])
        return plan()

    scheduler.plan = preempting_plan
    try:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        del scheduler.plan
    assert scheduler.stats().num_preemptions - before >= max(steps // 3 - 1, 1)
    return outputs
