"""What the tiny model is asked, and what it says."""

import httpx

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
SUM = [{"role": "user", "content": "What is 47 + 38?"}]
THINKING = {"chat_template_kwargs": {"thinking": True}}
THOUGHT = "Together 85."
"""The reasoning about SUM ends with it."""
SUM_ANSWER = "47 + 38 = 85."

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME_TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time in a city.",
        "parameters": WEATHER_TOOL["function"]["parameters"],
        "strict": True,
    },
}
BERLIN = [{"role": "user", "content": "What is the weather in Berlin?"}]
BERLIN_ARGUMENTS = {"city": "Berlin"}
BERLIN_RESULT = '{"temperature": 21, "sky": "cloudy"}'
BERLIN_ANSWER = "It is 21 °C and cloudy in Berlin."
AGE = [{"role": "user", "content": "Mia is 34 years old. Give name and age as JSON."}]


def post(url, body):
    """Without a client's help, so that every byte of the answer can be judged."""
    return httpx.post(url, json=body, timeout=120)
