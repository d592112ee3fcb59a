"""The benchmark runs that NVIDIA's and vLLM's guides publish, by name, with their figures."""
