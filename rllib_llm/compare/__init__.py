"""Comparing precision policies: raw curves of arms × seeds, statistics over seeds, and a self-contained HTML report."""

from rllib_llm.compare.curves import SCHEMA, Curves, CurvesError, CurveWriter, Run, read_curves

__all__ = ["SCHEMA", "CurveWriter", "Curves", "CurvesError", "Run", "read_curves"]
