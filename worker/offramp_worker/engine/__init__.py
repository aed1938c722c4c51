"""The engine: sessions, batches, arms, exits, audits and what is counted. Knows no HTTP."""
