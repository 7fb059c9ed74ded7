"""Durable state: one interface per aggregate, implemented by SQLite."""
