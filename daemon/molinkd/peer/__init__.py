"""The daemon of one PC: supervises workers, keeps model files, talks to coordinator and heads."""
