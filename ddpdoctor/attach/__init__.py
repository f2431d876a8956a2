"""Looks from outside at a job that was started without the doctor: whose ranks stand where."""
