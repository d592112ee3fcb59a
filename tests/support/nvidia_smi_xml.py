"""The answer of `nvidia-smi -q -x`, cut to the elements that `doctor --tune` reads, in the form since driver 555.

An idle H200 stands for each GPU: a change is given as path=value, with __ for / between the elements.
"""

from xml.etree import ElementTree

IDLE_H200 = {
    "product_name": "NVIDIA H200",
    "product_architecture": "Hopper",
    "persistence_mode": "Enabled",
    "mig_mode/current_mig": "Disabled",
    "clocks_event_reasons/clocks_event_reason_gpu_idle": "Active",
    "clocks_event_reasons/clocks_event_reason_applications_clocks_setting": "Not Active",
    "clocks_event_reasons/clocks_event_reason_sw_power_cap": "Not Active",
    "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown": "Not Active",
    "compute_mode": "Default",
    "ecc_mode/current_ecc": "Enabled",
    "gpu_power_readings/current_power_limit": "700.00 W",
    "gpu_power_readings/max_power_limit": "700.00 W",
    "module_power_readings/current_power_limit": "N/A",
    "clocks/sm_clock": "345 MHz",
    "clocks/mem_clock": "3201 MHz",
    "max_clocks/sm_clock": "1980 MHz",
    "max_clocks/mem_clock": "3201 MHz",
}
HEAD = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'


def smi_xml(*, count=2, only=None, **changes):
    """Return the answer for `count` GPUs.

    :param only: the number of the one GPU that has the changes; all have them unless given.
    :param changes: new texts; None leaves the element out.
    """
    log = ElementTree.Element("nvidia_smi_log")
    for number in range(count):
        gpu = ElementTree.SubElement(log, "gpu", id=f"00000000:{0x1B + number:02X}:00.0")
        changed = {path.replace("__", "/"): text for path, text in changes.items()}
        texts = {**IDLE_H200, **(changed if only in (None, number) else {})}
        for path, text in texts.items():
            if text is not None:
                _place(gpu, path).text = text
    return HEAD + ElementTree.tostring(log, encoding="unicode")


def _place(element, path):
    for name in path.split("/"):
        child = element.find(name)
        element = child if child is not None else ElementTree.SubElement(element, name)
    return element
