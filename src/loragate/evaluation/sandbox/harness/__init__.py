"""The programs that run inside the sandbox.

Their text is sent in; inside they see each other and the standard library only, never the rest of the package.
"""
