"""Compute the package list that setup.cfg cannot express; everything else is declared there.

Three packages carry another name than their directory (see ``package_dir`` in setup.cfg). ``find:`` names packages
after directories, and a list kept by hand would silently leave a new sub-package out of the wheel.
"""

from setuptools import find_packages, setup

kernels = ["precision_kernels", *(f"precision_kernels.{name}" for name in find_packages("kernels"))]

setup(
    packages=[
        *find_packages(include=["precision_policies", "precision_policies.*", "rllib_llm", "rllib_llm.*"]),
        *kernels,
        "precision_policies.shipped",
        "rllib_llm.shipped_configs",
    ]
)
