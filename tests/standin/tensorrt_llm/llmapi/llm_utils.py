"""The one function of this module that is recorded."""

from tensorrt_llm._record import fields_of
from tensorrt_llm.llmapi.llm_args import from_dict


def update_llm_args_with_extra_dict(llm_args, llm_args_dict, extra_llm_api_options=None):
    """Both, the second winning, with the sections that need it made into their classes. Changes the second."""
    for key, row in fields_of("TorchLlmArgs").items():
        if "class_by" in row and llm_args_dict.get(key) is not None:
            llm_args_dict[key] = from_dict(key, llm_args_dict[key])
    return llm_args | llm_args_dict
