/* A libcuda.so.1 of two devices, which reads numbers in CUDA_VISIBLE_DEVICES as the driver does: up to the first bad one. */
#include <stdlib.h>
#include <string.h>

static int seen[2];

static int count(void)
{
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    char *end;
    int number = 0;
    if (text == NULL)
        text = "0,1";
    while (number < 2) {
        long index = strtol(text, &end, 10);
        if (end == text || index < 0 || index > 1)
            break;
        seen[number++] = (int) index;
        if (*end != ',')
            break;
        text = end + 1;
    }
    return number;
}

int cuInit(unsigned int flags)
{
    return flags ? 1 : count() ? 0 : 100;
}

int cuDeviceGetCount(int *number)
{
    *number = count();
    return 0;
}

int cuDeviceGet(int *device, int index)
{
    *device = 100 + seen[index];
    return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device)
{
    memset(uuid, device, 16);
    return 0;
}

int cuGetErrorName(int code, const char **text)
{
    *text = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_INVALID_VALUE";
    return 0;
}
