"""Around sparse attention: which keys it attends to, and the linear attention that makes up for the others."""
