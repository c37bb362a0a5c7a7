"""OpenVINO GenAI, continuous batching with its prefix cache. Options are properties of the CPU plugin."""

from worker import serve

CACHE_GB = 3
MAX_NUM_BATCHED_TOKENS = 2048


def load(job):
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = job["max_num_seqs"]
    scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": job["threads"]} | job["options"]
    pipe = genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)

    def generate(prompts, output_tokens):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_tokens, True, False
        ids = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [len(result.m_generation_ids[0]) for result in pipe.generate(ids, [config] * len(ids))]

    return generate


if __name__ == "__main__":
    serve(load, ["openvino-genai", "openvino"])
