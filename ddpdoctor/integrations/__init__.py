"""Entries for frameworks: a callback of Lightning, one of Transformers, a tracker of Accelerate.

Each module imports its framework, so it is imported only when asked for:
`from ddpdoctor.integrations.lightning import DoctorCallback`.
"""
