#pragma once
typedef struct _IO_FILE FILE;
